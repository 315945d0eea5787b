"""The release's config.json: what is read from it, and what is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.deepseek_v41_config import load_model_config, parse_model_config
from tests.random_model import RandomModel


def raw_config(*, is_quantised: bool = False) -> dict[str, Any]:
    return copy.deepcopy(RandomModel().config(is_quantised=is_quantised))


def test_the_fields_of_the_release_are_read() -> None:
    raw = raw_config(is_quantised=True)
    raw["text_config"]["compress_ratios"] = [0, 2, 2, 1, 1, 1, 0, 0, 0]
    config = parse_model_config(raw)
    assert config.compress_ratios == (0, 2, 2, 1, 1, 1)
    assert config.yarn_factor == 16
    assert config.is_quantised
    assert config.decoder_start == 3
    assert [config.kv_source_of(layer) for layer in range(6)] == [None, 1, 1, 3, 3, 3]
    assert [config.is_reindex(layer) for layer in range(6)] == [False, False, False, False, False, True]
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)
    assert not parse_model_config(raw_config()).is_quantised


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "several KV heads": ({"num_key_value_heads": 2}, "num_key_value_heads is 2, supported is 1"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
    "another scoring": ({"scoring_func": "sigmoid"}, "scoring_func"),
    "another top-k method": ({"topk_method": "greedy"}, "topk_method"),
    "no shared expert": ({"n_shared_experts": 0}, "n_shared_experts"),
    "unnormalised weights": ({"norm_topk_prob": False}, "norm_topk_prob"),
    "tied embeddings": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "another rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling"),
    "half a rope": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
        "rope_scaling.beta_fast is missing",
    ),
    "ratios too few": ({"compress_ratios": [0, 2, 2]}, "compress_ratios has 3 values for 6 layers"),
    "a ratio that cuts blocks": ({"compress_ratios": [0, 3, 3, 1, 1, 1]}, r"compress_ratios\[1\] is 3"),
    "a ratio without source": (
        {"compress_ratios": [2, 2, 2, 1, 1, 1]},
        "layer 0 has ratio 2 but no KV source",
    ),
    "a ratio unlike its source": ({"compress_ratios": [0, 2, 1, 1, 1, 1]}, "layer 2 has ratio 1, unlike"),
    "a source without ratio": ({"kv_source_layer_ids": [0, 1, 3]}, "kv_source_layer_ids names layer 0"),
    "a source without index": (
        {"index_source_layer_ids": [1, 5]},
        "KV source 3 is not in index_source_layer_ids",
    ),
    "an index source beyond": ({"index_source_layer_ids": [1, 3, 9]}, "index_source_layer_ids names a layer"),
    "candidates from nowhere": (
        {"candidate_source_layer_id": 5},
        "candidate_source_layer_id 5 is no KV source",
    ),
    "engram beyond": ({"engram_layer_ids": [6]}, "engram_layer_ids"),
    "groups that cut heads": ({"o_groups": 3}, "o_groups 3 does not divide 4 heads"),
    "odd rope": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15"),
    "rope wider than heads": ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64"),
    "head size off the cache's block": ({"head_dim": 48}, "head_dim 48"),
    "more experts than there are": ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    "no window": ({"sliding_window": 0}, "sliding_window"),
    "no n-gram": ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_the_engine_does_not_implement_is_refused_by_name(case: str) -> None:
    raw = raw_config()
    changes, message = REFUSED[case]
    raw["text_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        parse_model_config(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant_method", "awq"),
        ("weight_block_size", [128, 128]),
        ("scale_fmt", "fp32"),
        ("expert_dtype", "fp8"),
    ],
)
def test_other_quantisations_are_refused(name: str, value: object) -> None:
    raw = raw_config(is_quantised=True)
    raw["quantization_config"][name] = value
    with pytest.raises(ConfigError, match=f"quantization_config.{name}"):
        parse_model_config(raw)


@pytest.mark.parametrize("name", ["hidden_size", "q_lora_rank", "moe_intermediate_size", "engram_head_dim"])
def test_a_quantised_layout_needs_whole_blocks(name: str) -> None:
    for is_quantised in (False, True):
        raw = raw_config(is_quantised=is_quantised)
        raw["text_config"][name] = 40
        if not is_quantised:
            assert getattr(parse_model_config(raw), name) == 40
            continue
        with pytest.raises(ConfigError, match=f"{name} 40 is no multiple of 32"):
            parse_model_config(raw)


@pytest.mark.parametrize("name", ["hidden_size", "sliding_window", "engram_layer_ids", "compress_rope_theta"])
def test_a_missing_field_is_named(name: str) -> None:
    raw = raw_config()
    del raw["text_config"][name]
    with pytest.raises(ConfigError, match=f"text_config.{name} is missing"):
        parse_model_config(raw)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        parse_model_config({"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="no text_config"):
        parse_model_config({"architectures": ["DeepseekV41ForCausalLM"]})


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    assert load_model_config(tmp_path).hidden_size == 64
