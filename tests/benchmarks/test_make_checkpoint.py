"""Checkpoints in the release's layout: a small one through an engine, and the names of the whole one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import make_checkpoint
from benchmarks.make_checkpoint import _DRAFT, cut_config, main, shard_header
from benchmarks.model_dims import FLASH
from benchmarks.release_layout import Entry, release_entries, release_shards
from engine.api import Request, SamplingParams
from engine.checkpoint import read_checkpoint
from engine.config import EngineConfig
from engine.engram_tables import EngramTables
from engine.errors import ConfigError
from engine.layers.linear import ActivationFormat
from engine.layers.ngrams import NgramTables, bucket_primes
from engine.layers.ops import build_ops
from engine.llm_engine import LLMEngine
from engine.loader import WeightReader
from engine.models.deepseek_v41 import DeepseekV41Model
from engine.models.deepseek_v41_config import load_model_config, parse_model_config

SMALL = ["--dims", "small", "--layers", "0,1,2,6,8", "--draft-stages", "1"]

NUM_RELEASE_TENSORS = 96_085
NUM_RELEASE_BYTES = 510_286_023_000
NUM_VISION_TENSORS = 266
NUM_VISION_BYTES = 970_536_960
"""What the release has besides text and draft stages; not known by name. A tower of 32 layers, 1,024 wide with
2,816 inside, has 822 MB of weights, and a two-layer aligner from 9 x 1,024 to 5,120 has 147 MB."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    main([*SMALL, str(folder)])
    return folder


def test_a_cut_model_is_loaded_and_answers(small: Path) -> None:
    names = sorted(path.name for path in small.glob("*.safetensors"))
    assert names == [f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)]
    config = load_model_config(small)
    assert config.compress_ratios == (0, 0, 2, 1, 1)
    assert (config.kv_source_layer_ids, config.index_source_layer_ids) == ((2, 3), (2, 3, 4))
    assert (config.candidate_source_layer_id, config.engram_layer_ids) == (3, (1,))
    engine = LLMEngine.build(EngineConfig(model=str(small), device="cpu", max_model_len=256))
    engine.add_request(
        Request(
            request_id="row",
            prompt_token_ids=tuple(range(3, 90)),
            sampling=SamplingParams(temperature=0.0, max_tokens=5),
        )
    )
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    (completion,) = outputs[0].completions
    assert len(completion.token_ids) == 5
    logprobs = np.array(completion.logprobs)
    assert np.isfinite(logprobs).all()
    assert (logprobs < 0).all(), "random weights are sure of nothing"


def test_the_same_flags_write_the_same_bytes(small: Path, tmp_path: Path) -> None:
    main([*SMALL, str(tmp_path)])
    for path in small.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_a_folder_of_which_a_part_is_missing_has_no_index(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is there, of an earlier checkpoint too, stands for whole files."""
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)

    def stopped(*_: object, **__: object) -> Iterator[np.ndarray]:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_checkpoint, "random_pieces", stopped)
    with pytest.raises(KeyboardInterrupt):
        main([*SMALL, str(folder)])
    assert not list(folder.glob("*.index.json"))


def test_a_layer_without_its_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no KV source"):
        main(["--dims", "small", "--layers", "0,1,3", str(tmp_path)])


def whole_release() -> list[Entry]:
    text = cut_config(FLASH, range(40))["text_config"] | _DRAFT
    entries = release_entries(text, num_draft_stages=3)
    rest = NUM_VISION_BYTES - 2 * (NUM_VISION_TENSORS - 1)
    vision = [Entry("vision.0", "BF16", (rest // 2,))]
    return [*entries, *vision, *(Entry(f"vision.{i}", "BF16", (1,)) for i in range(1, NUM_VISION_TENSORS))]


def test_every_name_of_the_release_is_asked_for_or_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers of all 48 shards, without a byte of what they describe, through the model's own construction."""
    entries = whole_release()
    assert len(entries) == NUM_RELEASE_TENSORS
    assert sum(entry.num_bytes for entry in entries) == NUM_RELEASE_BYTES
    raw = cut_config(FLASH, range(40))
    assert raw["text_config"]["engram_num_embeddings"] == [384006168, 384016682]
    shards = release_shards(entries)
    assert len(shards) == 48
    assert [len(members) for members in shards.values()][-2:] == [2, 2], "tables are in the last two shards"
    for file, members in shards.items():
        header = shard_header(members)
        (tmp_path / file).write_bytes(header)
        os.truncate(tmp_path / file, len(header) + sum(entry.num_bytes for entry in members))
    assert len(read_checkpoint(tmp_path)) == NUM_RELEASE_TENSORS

    config = parse_model_config(json.loads(json.dumps(raw)))
    primes, offsets, _ = bucket_primes(config)
    tables = NgramTables(np.zeros(1, np.int64), 0, np.zeros((2, 4), np.int64), primes, offsets)
    ops = build_ops("torch")

    def build(**share: range) -> DeepseekV41Model:
        reader = WeightReader(
            tmp_path, dtype=torch.bfloat16, device=torch.device("meta"), keeps_quantised=True, **share
        )
        return DeepseekV41Model(
            reader,
            config,
            EngramTables(reader, config, tables, ops),
            activations=ActivationFormat("row", ops),
            ops=ops,
        )

    build()
    rank = build(local_experts=range(96, 192))
    assert rank._layers[39]._moe._w2.values.shape == (96, 5120, 1152)
