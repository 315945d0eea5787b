"""Other shapes of the architecture than the golden models': each against the float64 re-implementation, and bit for bit.

Random weights; every config differs from the others in many ways at once, and prompts are long enough that
windows, selections and candidate blocks cut.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.layer_rows import layer_rows
from tests.engine.golden_harness import (
    CHUNKS,
    MODEL_FOLDERS,
    LoadedModel,
    PromptRun,
    load_goldens,
    load_model,
    run_prompts,
)
from tests.random_model import RandomModel, write_model
from tests.spec_model import SpecModel

CONFIGS: dict[str, dict[str, object]] = {
    "two-heads-of-96": {
        "num_attention_heads": 2,
        "head_dim": 96,
        "qk_rope_head_dim": 32,
        "sliding_window": 5,
        "index_topk": 3,
        "compress_ratios": [0, 4, 4, 1, 1, 1],
        "engram_layer_ids": [0, 4],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 3,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
    },
    "two-streams-no-candidates": {
        "num_attention_heads": 6,
        "o_groups": 3,
        "head_dim": 64,
        "sliding_window": 33,
        "hc_mult": 2,
        "candidate_source_layer_id": None,
        "index_source_layer_ids": [1, 2, 3, 4],
        "n_routed_experts": 5,
        "num_experts_per_tok": 1,
    },
    "no-engram-all-compressing": {
        "engram_layer_ids": [],
        "num_attention_heads": 3,
        "o_groups": 1,
        "sliding_window": 7,
        "compress_ratios": [2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 1, 2, 3, 5],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 8,
        "vocab_size": 97,
        "hidden_size": 96,
    },
    "no-compression": {
        "compress_ratios": [0] * 4,
        "num_hidden_layers": 4,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
        "num_attention_heads": 5,
        "o_groups": 5,
        "sliding_window": 9,
    },
    "mixed-ratios-and-gaps": {
        "num_hidden_layers": 8,
        "compress_ratios": [8, 0, 8, 2, 0, 4, 4, 1],
        "kv_source_layer_ids": [0, 3, 5, 7],
        "index_source_layer_ids": [0, 2, 3, 5, 6, 7],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_topk": 3,
        "engram_layer_ids": [3, 7],
        "engram_head_dim": 64,
        "hc_mult": 3,
    },
    "one-source-window-of-one": {
        "sliding_window": 1,
        "compress_ratios": [0, 0, 2, 2, 2, 2],
        "kv_source_layer_ids": [2],
        "index_source_layer_ids": [2, 4],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 1,
        "index_topk": 4,
        "hc_sinkhorn_iters": 3,
        "index_head_dim": 64,
        "index_n_heads": 3,
    },
}
SPEC_LENGTH = 45
LONG = 150


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the quantised layout, and beside it the same numbers in the bf16 layout."""
    seed = list(CONFIGS).index(request.param)
    model = RandomModel(seed=seed, text={**CONFIGS[request.param], **_class_count(request.param)})
    return write_model(tmp_path_factory.mktemp(request.param), model, is_quantised=True)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


def _class_count(name: str) -> dict[str, object]:
    return {"engram_compressed_vocab_size": CONFIGS[name].get("vocab_size", 96)}


def random_prompt(loaded: LoadedModel, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(loaded.config.vocab_size) for _ in range(length)]


def test_the_spec_gives_the_golden_values() -> None:
    """The re-implementation itself against the oracle, on a golden prompt."""
    folder = MODEL_FOLDERS["tiny"]
    golden = next(g for g in load_goldens("tiny", "noquant") if len(g.prompt) == 40)
    classes = load_model(folder).tables.token_classes.tolist()
    assert (SpecModel(folder, classes).logits(golden.prompt) - golden.tensors["logits"]).abs().max() < 1e-4


def test_logits_are_the_specs(folder: Path, loaded: LoadedModel) -> None:
    classes = loaded.tables.token_classes.tolist() if loaded.tables else list(range(loaded.config.vocab_size))
    prompt = random_prompt(loaded, SPEC_LENGTH, seed=1)
    expected = SpecModel(folder / "dequantised", classes).logits(prompt)
    (run,) = run_prompts(loaded, [PromptRun(prompt, CHUNKS)], is_quantised=False)
    assert expected.std() > 0.5
    assert (run.rows("logits") - expected).abs().max() < 1e-4


def test_chunks_and_neighbours_change_no_bit(loaded: LoadedModel) -> None:
    prompts = [random_prompt(loaded, length, seed=length) for length in (LONG, 33, 70)]
    alone = [run_prompts(loaded, [PromptRun(p)], is_quantised=True)[0] for p in prompts]
    plans = (CHUNKS, (1, 2, 3, 40), (64,))
    mixed = [
        PromptRun(p, plan, starts_at_step=i) for i, (p, plan) in enumerate(zip(prompts, plans, strict=True))
    ]
    run_prompts(loaded, mixed, is_quantised=True)
    for one, other in zip(alone, mixed, strict=True):
        assert torch.equal(one.rows("logits"), other.rows("logits"))


def test_the_decoder_tail_changes_no_bit(loaded: LoadedModel) -> None:
    prompt = random_prompt(loaded, LONG, seed=5)
    rows = layer_rows(loaded.shape, "exact", tail_end=LONG, cached_until=0)
    assert rows.first_output[loaded.shape.decoder_start] > 0, "nothing is cut"
    (full,) = run_prompts(loaded, [PromptRun(prompt)], is_quantised=True)
    for chunks in (None, CHUNKS):
        (cut,) = run_prompts(
            loaded, [PromptRun(prompt, chunks)], is_quantised=True, mode="exact", is_traced=False
        )
        assert torch.equal(cut.last_logits, full.rows("logits")[-1])
        assert torch.equal(cut.last_logits, full.last_logits)


def test_both_layouts_of_one_model_agree(folder: Path, loaded: LoadedModel) -> None:
    prompt = random_prompt(loaded, 30, seed=9)
    plain = load_model(folder / "dequantised")
    assert loaded.config.is_quantised
    assert not plain.config.is_quantised
    runs = [run_prompts(m, [PromptRun(prompt)], is_quantised=True)[0] for m in (loaded, plain)]
    assert torch.equal(runs[0].rows("logits"), runs[1].rows("logits"))


def test_quantised_activations_change_the_answer_but_not_its_exactness(
    folder: Path, loaded: LoadedModel
) -> None:
    prompt = random_prompt(loaded, 40, seed=11)
    released = load_model(folder, activations="release")
    (plain,) = run_prompts(loaded, [PromptRun(prompt)], is_quantised=True)
    (one_shot,) = run_prompts(released, [PromptRun(prompt)], is_quantised=True)
    (chunked,) = run_prompts(released, [PromptRun(prompt, CHUNKS)], is_quantised=True)
    assert torch.equal(one_shot.rows("logits"), chunked.rows("logits"))
    assert not torch.equal(one_shot.rows("logits"), plain.rows("logits"))
