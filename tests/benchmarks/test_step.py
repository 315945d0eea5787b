"""The simulated rank at small dimensions: what it computes hangs on the workload alone, and is all measured."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks import step
from benchmarks.digests import digest
from benchmarks.floors import stage_floors_ms
from benchmarks.model_dims import DIMS, rank_config
from benchmarks.random_weights import RandomWeights
from benchmarks.stages import STAGES
from benchmarks.step_rank import SimulatedRank, Workload

CPU = torch.device("cpu")
SMALL = {"dims": "small", "num_layers": 10, "dtype": "float32", "kernel_impl": "torch"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def parsed(*words: str) -> Workload:
    parser = argparse.ArgumentParser()
    step.add_options(parser)
    return step.workload_of(parser.parse_args([*words]))


def test_the_suite_ends_with_figures_and_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    step.main(["--dims", "small", "--steps", "1", "--warm-up", "0", "--layers", "0-4"])
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    figures, hashes = result["figures"], result["hashes"]
    assert "layers 0-4 of 10 (CUT)" in output
    assert result["workload"]["num_layers"] == 5
    assert {f"stage {stage} ms" for stage in STAGES} <= figures.keys()
    for stage in ("selection", "attention core", "MoE", "engram", "hyper-connections and norms"):
        assert figures[f"stage {stage} ms"] > 0, stage
    for layer in range(5):
        assert {f"layer {layer:2} streams", f"layer {layer:2} attn_out", f"cache {layer:2} window"} <= set(
            hashes
        )
    assert {"tokens", "logits", "cache  2 entries", "cache  4 index keys"} <= set(hashes)


def test_ranks_that_share_the_experts_have_the_bits_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    hashes = []
    for words in (["--group", "1"], ["--ranks", "2"]):
        step.main(["--dims", "small", "--steps", "1", "--warm-up", "0", "--layers", "0-2", *words])
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        hashes.append(result["hashes"])
    assert hashes[0] == hashes[1]
    assert result["workload"]["is_real"]
    assert result["figures"]["stage traffic between ranks ms"] > 0


def test_hashes_follow_the_workload_alone() -> None:
    def hashes(**changes: object) -> dict[str, str]:
        rank = SimulatedRank(Workload(**{**SMALL, **changes}), CPU)
        rank.step()
        return rank.cache_hashes() | rank.output_hashes()

    first = hashes()
    assert hashes() == first
    other = hashes(activations="none")
    assert other["layer  9 streams"] != first["layer  9 streams"]
    assert other["cache  9 window"] != first["cache  9 window"]


def test_a_reset_cache_gives_the_first_step_again() -> None:
    rank = SimulatedRank(Workload(**SMALL), CPU)
    first = rank.step()
    caches = rank.cache_hashes()
    rank.step()
    rank.reset()
    assert torch.equal(rank.step(), first)
    assert rank.cache_hashes() == caches


def test_rows_of_the_whole_group_reach_the_local_experts() -> None:
    rank = SimulatedRank(Workload(**SMALL), CPU)
    routes: list[torch.Tensor] = []
    rank.step(lambda name, value: routes.append(value) if name.startswith("route_ids") else None)
    assert rank.config.n_routed_experts == 4
    for ids in routes:
        assert ids.shape == (64, 2)
        assert set(ids.unique().tolist()) == {0, 1, 2, 3}
    # Two of sixteen experts fall onto one of four now and then; a router of four would never choose one twice.
    assert any((ids[:, 0] == ids[:, 1]).any() for ids in routes)


def test_a_mid_prompt_chunk_stops_behind_the_last_source() -> None:
    rank = SimulatedRank(Workload(**SMALL | {"num_layers": 7, "decoder": "mid"}), CPU)
    before = rank.cache_hashes()
    assert rank.step().shape[0] == 0
    changed = {name for name, value in rank.cache_hashes().items() if value != before[name]}
    assert {"cache  6 entries", "cache  6 index keys", "cache  5 window"} <= changed
    assert "cache  6 window" not in changed
    assert rank.num_run_layers == 6


def test_options_make_a_workload() -> None:
    assert parsed("--layers", "0-23").num_layers == 24
    assert parsed("--decoder", "mid").num_layers == 21
    assert parsed().num_layers == 40
    for words in (["--layers", "3-5"], ["--layers", "4"], ["--decoder", "mid", "--layers", "0-9"]):
        with pytest.raises(ValueError, match="layer"):
            parsed(*words)
    with pytest.raises(ValueError, match="experts cannot be held"):
        rank_config(DIMS["small"], num_layers=4, num_ranks=5)


def test_floors_of_the_shared_step() -> None:
    """The totals that follow from the model page's flops by hand: 132.8 ms whole, 67.0 in mid-prompt."""

    def total(num_layers: int) -> float:
        config = rank_config(DIMS["flash"], num_layers=40, num_ranks=4)
        return sum(stage_floors_ms(config, num_layers=num_layers, num_new=4096, context=131072).values())

    assert total(40) == pytest.approx(132.8, rel=0.005)
    assert total(20) == pytest.approx(67.0, rel=0.005)


def test_weights_come_in_the_releases_formats() -> None:
    weights = RandomWeights(dtype=torch.float32, device=CPU, router_factor=4)
    assert weights.raw("layers.0.attn.wq_a.weight", (64, 128)).dtype == torch.float8_e4m3fn
    assert weights.raw("layers.0.ffn.experts.3.w2.weight", (64, 32)).dtype == torch.int8
    assert weights.scales("layers.0.ffn.experts.3.w2.scale", (64, 2)).dtype == torch.uint8
    assert weights.raw("layers.0.ffn.gate.weight", (8, 64)).shape == (32, 64)
    assert weights.raw("layers.0.attn_norm.weight", (64,)).unique().tolist() == [1.0]
    assert not weights.has("layers.0.attn.compressor.wkv.scale")
    for name in ("layers.0.attn.wkv", "layers.0.ffn.experts.1.w1"):
        width = 256
        size = weights.linear(name, 512, width).std().item() * width**0.5
        assert 0.5 < size < 2, "an output is about as large as its input"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_digest_sees_each_byte_and_its_place(dtype: torch.dtype) -> None:
    value = torch.arange(101).to(dtype)
    assert digest(value) == digest(value.clone())
    for index in (0, 50, 100):
        changed = value.clone()
        changed.view(torch.uint8)[index * value.itemsize] ^= 1
        assert digest(changed) != digest(value)
    assert digest(value.flip(0)) != digest(value)
    assert digest(value[:100].view(10, 10)) != digest(value[:100])


def test_layers_before_the_first_engram_run_without_a_table() -> None:
    rank = SimulatedRank(Workload(**{**SMALL, "num_layers": 1}), CPU)
    assert not rank.config.engram_layer_ids
    assert rank.step().isfinite().all()
