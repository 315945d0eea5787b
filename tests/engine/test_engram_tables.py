"""Where n-gram tables lie changes no bit, and every row comes from where it is said to."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import engine.model_runner
import engine.staged_rows
from engine.api import Request, SamplingParams
from engine.checkpoint import StoredTensor
from engine.staged_rows import RowReader, StagedTable
from tests.engine.engine_harness import build_engine, digests, run
from tests.engine.golden_harness import MODEL_FOLDERS

PLACES = ("gpu", "host", "mmap")
MANY = 16
SETTINGS: dict[str, dict[str, object]] = {
    "chunks": {"max_num_batched_tokens": 37},
    "offload": {"max_num_batched_tokens": 64, "num_kv_blocks": 7, "max_num_seqs": 12},
    "recompute": {
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 7,
        "max_num_seqs": 12,
        "preemption": "recompute",
    },
    "cache": {"max_num_batched_tokens": 150, "num_kv_blocks": 60},
}


@pytest.fixture(params=[1, MANY])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a CPU reads in its own thread, one on a GPU in many: here in either way."""
    monkeypatch.setitem(engine.staged_rows.NUM_THREADS, "cpu", request.param)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and look-aheads beside the step, as on a GPU."""
    monkeypatch.setitem(engine.staged_rows.NUM_THREADS, "cpu", MANY)


def rows_of(model: str) -> list[Request]:
    """Prompts that share 203 tokens and more, then short ones that decode together."""
    rng = random.Random(f"engram {model}")
    vocab = {"tiny": 480, "tiny-quant": 480, "bard": 4096}[model]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    shared = [rng.randrange(9, vocab) for _ in range(203)]
    lengths = [(203, 40), (203, 3), (64, 62), (0, 62), (0, 61), (0, 63), (0, 2)]
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=shared[:common] + [rng.randrange(9, vocab) for _ in range(own)],
            sampling=replace(sampling, temperature=0.7 * (i % 2)),
        )
        for i, (common, own) in enumerate(lengths)
    ]


@pytest.mark.parametrize("model", ["tiny", "tiny-quant"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("many_threads")
def test_all_places_give_the_same_bits(model: str, name: str) -> None:
    found = []
    for place in PLACES:
        built = build_engine(MODEL_FOLDERS[model], engram=place, **SETTINGS[name])
        assert built.resolved.engram == place
        assert built.runner.is_read_ahead == (place == "mmap")
        rows = sorted(rows_of(model), key=lambda row: len(row.prompt_token_ids))
        passes = [digests(run(built, rows)) for _ in range(2 if name == "cache" else 1)]
        stats = built.stats()
        found.append((passes, stats.num_preemptions, stats.num_cached_tokens))
    assert found[0] == found[1] == found[2]
    passes, num_preemptions, num_cached = found[0]
    assert passes[0] == passes[-1]
    assert num_cached > 0 if name == "cache" else name == "chunks" or num_preemptions > 0


def test_a_full_host_leaves_tables_in_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has no room either: what the plan would like is asked of the host."""
    estimate = engine.model_runner.estimate_memory

    def on_host(config, **known):
        return replace(estimate(config, **known), engram="host", engram_reason="the device has no room")

    monkeypatch.setattr(engine.model_runner, "estimate_memory", on_host)
    monkeypatch.setattr(engine.model_runner, "available_bytes", lambda: 1 << 20)
    assert build_engine(MODEL_FOLDERS["tiny-quant"]).resolved.engram == "mmap"
    monkeypatch.setattr(engine.model_runner, "available_bytes", lambda: 1 << 40)
    assert build_engine(MODEL_FOLDERS["tiny-quant"]).resolved.engram == "host"
    monkeypatch.setattr(engine.model_runner, "available_bytes", lambda: 1 << 20)
    assert build_engine(MODEL_FOLDERS["tiny-quant"], engram="host").resolved.engram == "host"


def test_a_cpu_leaves_tables_in_their_files() -> None:
    built = build_engine(MODEL_FOLDERS["tiny"])
    assert built.resolved.engram == "mmap"
    assert not built.runner.is_read_ahead


@pytest.fixture
def stored(tmp_path: Path) -> tuple[list[StoredTensor], list[np.ndarray]]:
    """A file with two tensors of 5000 rows, off every boundary, and what is in them."""
    rng = np.random.default_rng(0)
    widths = (256, 8)
    arrays = [rng.integers(0, 256, (5000, width), dtype=np.uint8) for width in widths]
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4099 + b"".join(array.tobytes() for array in arrays))
    offsets = (4099, 4099 + arrays[0].nbytes)
    tensors = [
        StoredTensor(f"t{i}", path, "U8", array.shape, offset, array.nbytes)
        for i, (array, offset) in enumerate(zip(arrays, offsets, strict=True))
    ]
    return tensors, arrays


@pytest.mark.parametrize("count", [0, 1, 7, 24, MANY * 8 + 1, 4096])
@pytest.mark.usefixtures("num_threads")
def test_staged_rows_are_the_files(stored: tuple[list[StoredTensor], list[np.ndarray]], count: int) -> None:
    tensors, arrays = stored
    table = StagedTable(RowReader(torch.device("cpu")), tensors, max_num_rows=4096)
    rng = np.random.default_rng(count)
    # A fetch is under way while the one before it is used: each has its own buffer.
    numbers = [rng.integers(0, 5000, (count, 1)) for _ in range(5)]
    ahead = table.fetch(lambda: numbers[0])
    for step in range(5):
        with table.taken(ahead) as fetched:
            if step < 4:
                ahead = table.fetch(lambda step=step: numbers[step + 1])
                ahead.result()
            assert fetched.ids is numbers[step]
            for got, array in zip(fetched.tensors, arrays, strict=True):
                assert np.array_equal(got.numpy(), array[numbers[step][:, 0]])


@pytest.mark.usefixtures("num_threads")
def test_a_failing_fetch_ends_the_step_that_needs_it(
    stored: tuple[list[StoredTensor], list[np.ndarray]],
) -> None:
    def fail() -> np.ndarray:
        raise RuntimeError("no such rows")

    table = StagedTable(RowReader(torch.device("cpu")), stored[0], max_num_rows=8)
    with pytest.raises(RuntimeError, match="no such rows"), table.taken(table.fetch(fail)):
        pass
    with table.taken(table.fetch(lambda: np.array([3]))) as fetched:
        assert np.array_equal(fetched.tensors[0].numpy()[0], stored[1][0][3])
