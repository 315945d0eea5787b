"""The same bits on a GPU: whatever the batch, chunk, pool, cache, preemption or decoder tail.

The CPU's property test covers many more mixes; here a fixed handful runs per dtype, and the scratch
of a step is held against the context length.
"""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import make_checkpoint
from engine import EngineConfig, Request, SamplingParams
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.models.deepseek_v41_config import load_model_config
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from engine.sequence import Sequence

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parents[1] / "data"
MODELS = {
    "tiny": DATA / "tiny",
    "tiny-quant": DATA / "tiny-quant",
    "bard": Path(__file__).parents[2] / "examples" / "bard" / "model",
}
DISTURBANCES: dict[str, dict[str, object]] = {
    "together": {},
    "no graphs": {"cuda_graphs": False},
    "small chunks": {"max_num_batched_tokens": 37},
    "offload": {"max_num_batched_tokens": 64, "num_kv_blocks": 12},
    "recompute": {"max_num_batched_tokens": 64, "num_kv_blocks": 12, "preemption": "recompute"},
    "no prefix cache": {"enable_prefix_caching": False},
    "full decoder": {"decoder_prefill": "full", "max_num_batched_tokens": 100},
    "tables on the host": {"engram": "host", "max_num_batched_tokens": 64, "num_kv_blocks": 12},
    "tables in files": {"engram": "mmap", "max_num_batched_tokens": 64, "num_kv_blocks": 12},
}


def requests(seed: int, vocab_size: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(10, vocab_size) for _ in range(256)]
    result = []
    for index, length in enumerate((1, 17, 150, 40, 300, 64)):
        prompt = [rng.randrange(10, vocab_size) for _ in range(length)]
        sampling = SamplingParams(
            temperature=(0.0, 0.8)[index % 2], top_p=0.9, max_tokens=8, n=1 + (index == 3), ignore_eos=True
        )
        ids = shared[: 64 * (index % 4)] + prompt
        result.append(Request(request_id=f"row {index}", prompt_token_ids=ids, sampling=sampling))
    return result


def answers(config: EngineConfig, batches: list[list[Request]]) -> dict[str, list[str]]:
    engine = LLMEngine.build(config)
    digests = {}
    for batch in batches:
        for request in batch:
            engine.add_request(request)
        while engine.has_unfinished():
            for output in engine.step():
                digests[output.request_id] = [c.output_digest for c in output.completions]
            engine.scheduler.check_integrity()
    graphs = engine.runner.decode_graphs
    if engine.resolved.cuda_graphs and len(batches) == 1:
        assert graphs is not None
        assert graphs.num_replays > 0, "no decode step was replayed"
    return digests


def check_disturbances(path: Path, dtype: str, kernel_impl: str, **settings: object) -> None:
    """The digests of rows one by one (whole decoder, no cache, no graphs) are those of every disturbance."""
    seed = 20261130
    print(f"seed {seed}")

    def config(**changes: object) -> EngineConfig:
        return EngineConfig(
            model=str(path),
            dtype=dtype,
            device="cuda",
            kernel_impl=kernel_impl,
            max_model_len=1024,
            **settings,
            **changes,
        )

    rows = requests(seed, load_model_config(path).vocab_size)
    plain = config(decoder_prefill="full", enable_prefix_caching=False, cuda_graphs=False)
    alone = answers(plain, [[row] for row in rows])
    for name, changes in DISTURBANCES.items():
        if kernel_impl == "torch" and changes.get("engram") == "host":
            continue  # only kernels read host memory
        assert answers(config(**changes), [rows]) == alone, name


@pytest.mark.parametrize("kernel_impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_disturbance_leaves_the_bits(model: str, dtype: str, kernel_impl: str) -> None:
    check_disturbances(MODELS[model], dtype, kernel_impl)


@pytest.mark.timeout(900, method="thread")  # minutes of compiling; and a kernel that hangs is told
@pytest.mark.parametrize("activations", ["row", "release"])
def test_every_disturbance_leaves_the_bits_at_the_releases_dimensions(
    tmp_path: Path, activations: str
) -> None:
    """Kernels that only its shapes take, on prompts from their first token on: a layer of every kind."""
    layers = ["--layers", "0,1,2,20,24", "--experts", "12", "--engram-vocab-size", "2000"]
    make_checkpoint.main([*layers, "--repeat", str(tmp_path)])
    check_disturbances(tmp_path, "bfloat16", "triton", activation_quantisation=activations)


def requested_bytes(kind: str) -> int:
    """Bytes asked of the allocator: what it gives also depends on the blocks that were freed before."""
    found: int = torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]
    return found


def test_c09_scratch_does_not_grow_with_the_context(tmp_path: Path) -> None:
    """One chunk at the end of 8k, 64k and 256k tokens: the same peak outside the pools, within 10 %."""
    source = MODELS["bard"]
    for path in source.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    raw = json.loads((source / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 300_000
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(
        model=str(tmp_path), dtype="bfloat16", device="cuda", max_num_seqs=1, max_num_batched_tokens=4096
    )
    runner = ModelRunner(
        config, load_model_config(tmp_path), Tokenizer.from_file(str(source / "tokenizer.json"))
    )
    rng = random.Random(0)
    peaks = {}
    for length in (8 << 10, 64 << 10, 256 << 10):
        tokens = [rng.randrange(10, 4096) for _ in range(length)]
        seq = Sequence.build(
            Request(request_id="long", prompt_token_ids=tokens),
            sample_index=0,
            seq_id=0,
            max_model_len=300_000,
        )
        seq.state_slot, seq.block_table = 0, array("q", range(length // 64))
        chunk = ScheduledChunk(
            seq=seq,
            start=length - 4096,
            num_tokens=4096,
            tail_end=length,
            cached_until=0,
            mode="full",
            samples=True,
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes("current")
        runner.run(ScheduledBatch(chunks=[chunk]))
        torch.cuda.synchronize()
        peaks[length] = requested_bytes("peak") - before
    print(f"peak bytes outside the pools by context: {peaks}")
    assert max(peaks.values()) <= 1.1 * min(peaks.values())
