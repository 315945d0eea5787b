"""The estimate from headers against what a built engine really holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import make_checkpoint
from engine import ConfigError, EngineConfig, Request, SamplingParams, estimate_memory
from engine.layers.linear import ActivationFormat
from engine.layers.ngrams import build_ngram_tables
from engine.layers.ops import build_ops
from engine.llm_engine import LLMEngine
from engine.loader import WeightReader
from engine.models.deepseek_v41 import DeepseekV41Model
from engine.models.deepseek_v41_config import load_model_config
from tests.conftest import ROOT

FOLDERS = [ROOT / "tests" / "data" / "tiny", ROOT / "tests" / "data" / "tiny-quant"]


def tensors_of(found: object, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor that an object of ours reaches, each storage once."""
    if id(found) in seen:
        return []
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, list | tuple):
        values = list(found)
    elif isinstance(found, dict):
        values = list(found.values())
    elif type(found).__module__.startswith("engine"):
        slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
        names = {*getattr(found, "__dict__", {}), *slots}
        values = [getattr(found, name) for name in names if hasattr(found, name)]
    else:
        return []
    return [tensor for value in values for tensor in tensors_of(value, seen)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_weights_and_cache_take_what_was_estimated(folder: Path, dtype: str) -> None:
    config = EngineConfig(
        model=str(folder), dtype=dtype, device="cpu", max_num_seqs=3, num_kv_blocks=70, host_memory_bytes=0
    )
    found = estimate_memory(config)
    runner = LLMEngine.build(config).runner
    assert found.num_bytes_per_block == runner.layout.num_bytes_per_block
    assert found.num_state_bytes == 3 * runner.layout.num_bytes_per_state
    weights = sum(t.untyped_storage().nbytes() for t in tensors_of(runner.model, set()))
    assert found.num_weight_bytes == pytest.approx(weights, rel=0.03)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found.num_checkpoint_bytes == pytest.approx(stored, rel=0.1)


def test_blocks_that_fit_a_device_are_counted_or_refused() -> None:
    config = EngineConfig(model=str(FOLDERS[0]), max_num_seqs=2, gpu_memory_utilization=0.5)
    found = estimate_memory(config)
    assert found.num_kv_blocks(config, 2 * found.num_least_bytes + 2) == found.num_blocks_per_longest
    with pytest.raises(ConfigError, match=r"max_model_len"):
        found.num_kv_blocks(config, 2 * found.num_least_bytes - 2)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FOLDERS[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="safetensors"):
        estimate_memory(EngineConfig(model=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="no readable"):
        estimate_memory(EngineConfig(model=str(tmp_path)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's formats at small dimensions."""
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint.main(["--dims", "small", "--layers", "0,1,2,6,8", str(folder)])
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_weights_as_kernels_read_them_and_as_ranks_share_them(small: Path, impl: str, num_ranks: int) -> None:
    config = load_model_config(small)
    ops = build_ops(impl)
    num_local = config.n_routed_experts // num_ranks
    reader = WeightReader(
        small,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        keeps_quantised=ops.reads_quantised,
        local_experts=range(num_local, 2 * num_local) if num_ranks > 1 else None,
    )
    tables = build_ngram_tables(config, Tokenizer.from_file(str(small / "tokenizer.json")))
    model = DeepseekV41Model(reader, config, tables, activations=ActivationFormat("row", ops), ops=ops)
    found = estimate_memory(
        EngineConfig(model=str(small), kernel_impl=impl, dtype="bfloat16"), num_expert_ranks=num_ranks
    )
    weights = sum(t.untyped_storage().nbytes() for t in tensors_of(model, set()))
    assert found.num_weight_bytes == pytest.approx(weights, rel=0.03)


def run_row(engine: LLMEngine) -> None:
    prompt = tuple(range(3, 90))
    engine.add_request(
        Request(request_id="row", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4))
    )
    while engine.has_unfinished():
        engine.step()


def test_a_long_limit_costs_short_rows_nothing(small: Path) -> None:
    """All tensors of an engine, at 8 k and at 1 M."""
    sizes = []
    for limit in (8192, 1 << 20):
        config = EngineConfig(
            model=str(small), device="cpu", max_model_len=limit, num_kv_blocks=4, host_memory_bytes=0
        )
        runner = LLMEngine.build(config).runner
        sizes.append(sum(t.untyped_storage().nbytes() for t in tensors_of(runner, set())))
    assert sizes[0] == sizes[1]


@pytest.mark.gpu
def test_a_long_limit_costs_short_rows_nothing_on_a_gpu(small: Path) -> None:
    peaks = []
    for limit in (8192, 8192, 1 << 20):  # the first one warms up what torch keeps
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        config = EngineConfig(model=str(small), device="cuda", max_model_len=limit, num_kv_blocks=4)
        run_row(LLMEngine.build(config))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] == pytest.approx(peaks[1], rel=0.03)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_plan_is_what_torch_measures(tmp_path: Path) -> None:
    """Real dimensions, three layers of 24 experts: weights, rings, blocks and a full step's scratch."""
    make_checkpoint.main(["--layers", "0,2,20", "--experts", "24", str(tmp_path)])
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        kernel_impl="triton",
        max_model_len=8192,
        max_num_batched_tokens=4096,
        num_kv_blocks=4096,
        host_memory_bytes=0,
    )
    plan = estimate_memory(config)
    before = torch.cuda.memory_allocated()
    engine = LLMEngine.build(config)
    held = torch.cuda.memory_allocated() - before
    kv_bytes = config.num_kv_blocks * plan.num_bytes_per_block
    planned = plan.num_weight_bytes + plan.num_state_bytes + kv_bytes
    assert held == pytest.approx(planned, rel=0.03)
    torch.cuda.reset_peak_memory_stats()
    engine.add_request(
        Request(
            request_id="row",
            prompt_token_ids=tuple(3 + i % 90_000 for i in range(8000)),
            sampling=SamplingParams(max_tokens=2),
        )
    )
    while engine.has_unfinished():
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx(plan.num_fixed_bytes + kv_bytes, rel=0.03)
