"""The estimate from headers against what a built engine really holds."""

from __future__ import annotations

import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import Tokenizer

import engine.auto_settings as auto_settings
from benchmarks import make_checkpoint
from engine import ConfigError, EngineConfig, MemoryEstimate, Request, SamplingParams, estimate_memory
from engine.config import KV_BLOCK_SIZE
from engine.decode_inputs import DecodeBuffers
from engine.decode_rooms import GRAPH_BYTES_A_LAYER, MAX_GRAPHS, most_room_rows, room_bytes
from engine.engram_tables import EngramTables
from engine.layers.linear import ActivationFormat
from engine.layers.ngrams import build_ngram_tables
from engine.layers.ops import build_ops
from engine.llm_engine import LLMEngine
from engine.loader import WeightReader
from engine.models.deepseek_v41 import DeepseekV41Model
from engine.models.deepseek_v41_config import load_model_config
from engine.peer_memory import ExchangeSize
from engine.scheduled_batch import ScheduledChunk
from engine.sequence import Sequence
from kernels.hyper_connections import NUM_STREAMS
from kernels.number_formats import SCALE_BLOCK
from tests.conftest import ROOT
from tests.engine.test_decode_graphs import with_rooms

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


def held_bytes(found: object, seen: set[int]) -> int:
    """Of the storages behind them."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(found, seen)}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_weights_and_cache_take_what_was_estimated(folder: Path, dtype: str) -> None:
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        device="cpu",
        engram="gpu",
        max_num_seqs=3,
        num_kv_blocks=70,
        host_memory_bytes=0,
    )
    found = estimate_memory(config)
    runner = LLMEngine.build(config).runner
    assert found.num_bytes_per_block == runner.layout.num_bytes_per_block
    assert found.num_state_bytes == 3 * runner.layout.num_bytes_per_state
    weights = sum(t.untyped_storage().nbytes() for t in tensors_of(runner.model, set()))
    assert found.num_weight_bytes + found.num_table_bytes == pytest.approx(weights, rel=0.03)
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
    model = DeepseekV41Model(
        reader,
        config,
        EngramTables(reader, config, tables, ops),
        activations=ActivationFormat("row", ops),
        ops=ops,
    )
    found = estimate_memory(
        EngineConfig(model=str(small), kernel_impl=impl, dtype="bfloat16"), num_expert_ranks=num_ranks
    )
    weights = sum(t.untyped_storage().nbytes() for t in tensors_of(model, set()))
    assert found.num_weight_bytes + found.num_table_bytes == pytest.approx(weights, rel=0.03)


@pytest.mark.parametrize("mode", ["none", "row", "release"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_exchange_of_ranks_fits_what_is_planned_for_it(
    small: Path, num_ranks: int, mode: Literal["none", "row", "release"]
) -> None:
    config = EngineConfig(model=str(small), kernel_impl="triton", dtype="bfloat16")
    model = load_model_config(small)
    size = ExchangeSize.of(model, config.max_num_batched_tokens, dtype=torch.bfloat16, mode=mode)
    alone, shared = (estimate_memory(config, num_expert_ranks=n).num_scratch_bytes for n in (1, num_ranks))
    slots = config.max_num_batched_tokens * model.num_experts_per_tok * model.hidden_size * 2
    # Beside what is made once: all ranks' rows sorted, and outputs for all of them.
    assert size.num_bytes(num_ranks) + 2 * num_ranks * slots <= shared - alone


def test_tables_go_where_there_is_room(small: Path) -> None:
    def plan(allowed_bytes: int | None, **settings: str) -> MemoryEstimate:
        config = EngineConfig(model=str(small), dtype="bfloat16", device="cuda", **settings)
        return estimate_memory(config, allowed_bytes=allowed_bytes)

    roomy = plan(None)
    assert roomy.engram == "gpu"
    assert plan(roomy.num_least_bytes).engram == "gpu"
    tight = plan(roomy.num_least_bytes - 1)
    assert tight.engram == "host"
    assert "once a node" in tight.describe(None)
    without_kernels = plan(roomy.num_least_bytes, kernel_impl="torch")
    assert without_kernels.num_graph_bytes == 0 < roomy.num_graph_bytes
    assert plan(without_kernels.num_least_bytes - 1, kernel_impl="torch").engram == "mmap"
    for place in ("gpu", "host", "mmap"):
        assert plan(0, engram=place).engram == place
    # One layer, 2048 rows, 4 look-ups of 32 values: as stored, with a scale, or widened.
    num_lookups = 2048 * 4
    assert plan(0, engram="mmap").num_staging_bytes == num_lookups * 33
    assert plan(0, engram="host").num_staging_bytes == num_lookups * 64
    least = [plan(0, engram=place).num_least_bytes for place in ("gpu", "host", "mmap")]
    assert least[0] - least[1] == roomy.num_table_bytes - num_lookups * 64
    assert least[1] > least[2]


def run_row(engine: LLMEngine, prompt: tuple[int, ...]) -> str:
    """The digest of its four tokens."""
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add_request(Request(request_id="row", prompt_token_ids=prompt, sampling=sampling))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs[0].completions[0].output_digest


def test_a_long_limit_costs_short_rows_nothing(small: Path) -> None:
    """All tensors of an engine whose row was decoded in a room, at 8 k and at 1 M."""
    sizes = []
    for limit in (8192, 1 << 20):
        config = EngineConfig(
            model=str(small), device="cpu", max_model_len=limit, num_kv_blocks=4, host_memory_bytes=0
        )
        engine = LLMEngine.build(config)
        rooms = with_rooms(engine)
        run_row(engine, (5, 6, 7))
        assert rooms.num_steps > 0
        sizes.append(held_bytes(engine.runner, set()))
    assert sizes[0] == sizes[1]


def test_rooms_take_what_is_planned_for_them() -> None:
    """Steps of 40 rows and fewer, in rooms of 64 and of 32."""
    limits = {"model": str(FOLDERS[0]), "dtype": "float32", "max_num_seqs": 40, "max_model_len": 1024}
    engine = LLMEngine.build(EngineConfig(**limits, device="cpu", num_kv_blocks=64, host_memory_bytes=0))
    rooms, seen = with_rooms(engine), set[int]()
    tensors_of([engine.runner.model, engine.runner.cache, engine.runner.engram_tables], seen)
    for index in range(40):
        sampling = SamplingParams(max_tokens=4 + index // 20, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(request_id=str(index), prompt_token_ids=(5 + index,), sampling=sampling))
    while engine.has_unfinished():
        engine.step()
    assert rooms.num_steps == 5
    facts, tables, lookups, outputs = 3 * 8, 16 * 8, 2 * 3 * 2 * 32 * 4, 4 * (64 * 4 + 4)
    assert held_bytes(rooms, seen) == 64 * (facts + tables + lookups)
    on_gpu = {"kernel_impl": "triton", "engram": "gpu", **limits}
    plan = estimate_memory(EngineConfig(**on_gpu), is_gpu=True)
    step = estimate_memory(EngineConfig(**on_gpu, max_num_batched_tokens=64), is_gpu=True).num_scratch_bytes
    launches = MAX_GRAPHS * engine.runner.shape.num_layers * GRAPH_BYTES_A_LAYER
    assert plan.num_graph_bytes - launches - step == 64 * (facts + tables + lookups + outputs)


def test_block_tables_of_all_contexts_are_planned_and_taken_when_they_come() -> None:
    buffers = DecodeBuffers(most_room_rows(40, 2048), torch.device("cpu"))
    for num_tokens in (1024, 2048, 4096):
        for num_rows in (64, 32):
            request = Request(request_id="row", prompt_token_ids=list(range(num_tokens)))
            seq = Sequence.build(request, sample_index=0, seq_id=0, max_model_len=num_tokens)
            seq.state_slot, seq.block_table = 0, array("q", range(num_tokens // KV_BLOCK_SIZE))
            chunk = ScheduledChunk(
                seq=seq, start=num_tokens - 1, num_tokens=1, tail_end=num_tokens, cached_until=0,
                mode="full", samples=True,
            )  # fmt: skip
            buffers.load([chunk], num_rows, num_tokens)
            assert held_bytes(buffers, set()) == room_bytes(64, num_tokens)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real dimensions, four layers of 24 experts, an n-gram table of half a gigabyte."""
    folder = tmp_path_factory.mktemp("large")
    layers = ["--layers", "0,1,2,20", "--experts", "24", "--engram-vocab-size", "80000"]
    make_checkpoint.main([*layers, "--repeat", str(folder)])
    return folder


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_plan_is_what_torch_measures(large: Path) -> None:
    """Weights, tables, rings, blocks and a full step's scratch; and wherever tables lie, the same bits."""
    digests, errors = set(), {}
    for place, num_rows in (("gpu", 4096), ("host", 4096), ("mmap", 4096), ("gpu", 1024)):
        config = EngineConfig(
            model=str(large),
            device="cuda",
            kernel_impl="triton",
            engram=place,
            max_model_len=8192,
            max_num_batched_tokens=num_rows,
            num_kv_blocks=4096,
            host_memory_bytes=0,
        )
        plan = estimate_memory(config)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = LLMEngine.build(config)
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        digests.add(run_row(engine, tuple(3 + i * i % 90_000 for i in range(8000))))
        peak = torch.cuda.max_memory_allocated() - before
        # Graphs of a few decode steps take little, most of it not from torch.
        planned = (
            plan.num_fixed_bytes - plan.num_graph_bytes + config.num_kv_blocks * plan.num_bytes_per_block
        )
        # Rows from host memory are there as long as a step only.
        passing = plan.num_scratch_bytes + (plan.num_staging_bytes if place == "host" else 0)
        print(
            f"{place}, {num_rows} rows: held {held:,} of {planned - passing:,}, peak {peak:,} of {planned:,}"
        )
        errors[place, num_rows] = max(abs(held / (planned - passing) - 1), abs(peak / planned - 1))
        del engine
    assert max(errors.values()) <= 0.03, errors
    assert len(digests) == 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_limit_costs_short_rows_nothing_on_a_gpu(large: Path) -> None:
    peaks = []
    for limit in (8192, 8192, 1 << 20):  # the first one warms up what torch keeps
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        config = EngineConfig(model=str(large), device="cuda", max_model_len=limit, num_kv_blocks=64)
        run_row(LLMEngine.build(config), tuple(range(3, 2000)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    print(f"peaks at 8 k, 8 k, 1 M: {peaks}")
    assert peaks[2] == pytest.approx(peaks[1], rel=0.03)


def test_no_kernels_are_planned_for_a_shape_that_they_do_not_serve(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS[0], tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), device="cuda")
    assert estimate_memory(config).num_graph_bytes > 0
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"candidate_block_size": 4', '"candidate_block_size": 128'))
    assert estimate_memory(config).num_graph_bytes == 0
    with pytest.raises(ConfigError, match="kernel_impl is triton, but candidate_block_size is 128"):
        estimate_memory(replace(config, kernel_impl="triton"))


def test_a_plan_knows_the_kernels_own_numbers() -> None:
    assert auto_settings.NUM_STREAMS == NUM_STREAMS
    assert auto_settings.SCALE_BLOCK == SCALE_BLOCK
