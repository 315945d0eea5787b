"""Ranks that share the experts, each a process of its own: one rank's bits, uneven work, and a death in mid-step.

Gloo on this machine's loopback; the last tests ask for two GPUs.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import Request, SamplingParams
from engine.config import EngineConfig, ReplicaPlace
from engine.errors import ConfigError, EngineDead, PeerLost
from engine.llm_engine import LLMEngine
from engine.parallel import ExpertGroup, host_rendezvous
from tests.conftest import ROOT
from tests.engine.engine_harness import Digests, digests, run

MODELS = {
    "tiny": ROOT / "tests" / "data" / "tiny",
    "tiny-quant": ROOT / "tests" / "data" / "tiny-quant",
    "bard": ROOT / "examples" / "bard" / "model",
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
}
SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 120.0  # for a busy machine; nothing here takes a tenth of it


def build_requests(seed: int, count: int, *, max_tokens: int = 2) -> list[Request]:
    """Prompts of different lengths, greedy and sampled, some with more than one sample.

    Seed 0's first is so long that its first chunk leaves a model's last layers no row.
    """
    draw = random.Random(seed)
    return [
        Request(
            request_id=f"{seed}/{index}",
            prompt_token_ids=[
                draw.randrange(3, 250)
                for _ in range(120 if seed == index == 0 else draw.choice([1, 9, 40, 75]))
            ],
            sampling=SamplingParams(
                temperature=index % 2,
                max_tokens=max_tokens,
                n=1 + index % 3 // 2,
                ignore_eos=True,
                logprobs=1,
            ),
        )
        for index in range(count)
    ]


def serve(
    place: ReplicaPlace,
    settings: dict[str, Any],
    requests: list[Request],
    dies_in: int,
    die: Callable[[LLMEngine], None],
    told: Queue[Any],
) -> None:
    """A rank: run ``requests`` beside the others; or ``die`` in the middle of step ``dies_in``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if settings["device"] == "cuda":
        torch.cuda.set_device(place.rank)
    try:
        engine = LLMEngine.build(EngineConfig(**settings), place)
        if settings["device"] == "cuda":
            told.put((f"path of {place.rank}", engine.resolved.exchange))
        for request in requests:
            engine.add_request(request)
        engine.close()
        outputs = {}
        while not engine.is_closed:
            dies_in -= 1
            if dies_in == 0:
                die(engine)
            for output in engine.step():
                outputs[output.request_id] = output
            engine.scheduler.check_integrity()
        if engine.runner.decode_graphs is not None:
            told.put((f"replays of {place.rank}", engine.runner.decode_graphs.num_replays))
        told.put((place.rank, digests(outputs)))
    except (ConfigError, EngineDead) as error:
        told.put((place.rank, error))


def die_in_an_exchange(engine: LLMEngine) -> None:
    """Have the process killed at its second exchange of rows: after the ranks have agreed on the step."""
    assert engine.runner.group is not None
    group, num_swaps = engine.runner.group, 0
    swap = group.swap

    def deadly(blocks: Any) -> Any:
        nonlocal num_swaps
        num_swaps += 1
        if num_swaps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return swap(blocks)

    group.swap = deadly  # type: ignore[method-assign]


def stand_still(engine: LLMEngine) -> None:
    """Have the process stopped as soon as the ranks have agreed on the step: the others wait for its rows."""
    assert engine.runner.group is not None
    agree = engine.runner.group.agree

    def deadly(rows: Sequence[int], *, has_work: bool) -> None:
        agree(rows, has_work=has_work)
        os.kill(os.getpid(), signal.SIGSTOP)

    engine.runner.group.agree = deadly  # type: ignore[method-assign]


def break_a_rule(engine: LLMEngine) -> None:
    """Have an argument refused as soon as the ranks have agreed on the step, in a process that lives on."""
    assert engine.runner.group is not None
    agree = engine.runner.group.agree
    threading.Thread(target=time.sleep, args=(2 * WAIT_S,)).start()

    def deadly(rows: Sequence[int], *, has_work: bool) -> None:
        agree(rows, has_work=has_work)
        raise ValueError("rows: expected [n, 3]")

    engine.runner.group.agree = deadly  # type: ignore[method-assign]


class Ranks:
    """Processes of one group and what they tell."""

    def __init__(
        self,
        settings: dict[str, Any] | list[dict[str, Any]],
        requests: list[list[Request]],
        dies: tuple[int, int] = (-1, 0),
        die: Callable[[LLMEngine], None] = die_in_an_exchange,
        timeout_s: float = WAIT_S,
    ) -> None:
        self._rendezvous = host_rendezvous("127.0.0.1")
        self._told: Queue[Any] = SPAWN.Queue()
        size = len(requests)
        self.processes = []
        for rank, own in enumerate(requests):
            place = ReplicaPlace(
                rank=rank, num_ranks=size, host="127.0.0.1", port=self._rendezvous.port, timeout_s=timeout_s
            )
            chosen = settings[rank] if isinstance(settings, list) else settings
            arguments = (place, chosen, own, dies[1] if rank == dies[0] else 0, die, self._told)
            self.processes.append(SPAWN.Process(target=serve, args=arguments, daemon=True))
        for process in self.processes:
            process.start()

    def answers(self, count: int) -> dict[Any, Any]:
        """What so many ranks tell, each once; on a GPU each tells two things."""
        return dict(self._told.get(timeout=WAIT_S) for _ in range(count))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def started() -> Iterator[list[Ranks]]:
    ranks: list[Ranks] = []
    yield ranks
    for each in ranks:
        each.end()


def settings_of(model: Path, **changes: Any) -> dict[str, Any]:
    return {"model": str(model), **SETTINGS, **changes}


def alone(settings: dict[str, Any], requests: list[Request]) -> Digests:
    return digests(run(LLMEngine.build(EngineConfig(**settings)), requests))


# How many requests each rank has: uneven, and none at all.
@pytest.mark.parametrize(
    ("model", "counts", "changes"),
    [
        ("tiny", (4, 2), {}),
        ("tiny", (0, 3, 1, 0), {"dtype": "bfloat16"}),
        ("tiny-quant", (1, 4), {"activation_quantisation": "row"}),
        ("tiny-quant", (3, 1, 0, 1), {}),
        ("bard", (1, 3), {}),
    ],
)
def test_any_number_of_ranks_gives_the_bits_of_one(
    started: list[Ranks], model: str, counts: tuple[int, ...], changes: dict[str, Any]
) -> None:
    settings = settings_of(MODELS[model], **changes)
    requests = [build_requests(seed, count) for seed, count in enumerate(counts)]
    started.append(Ranks(settings, requests))
    wanted = alone(settings, [request for own in requests for request in own])
    answers = started[0].answers(len(counts))
    for rank, own in enumerate(requests):
        assert answers[rank] == {request.request_id: wanted[request.request_id] for request in own}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_killed_in_mid_step_ends_it_for_all_within_seconds(
    started: list[Ranks], num_ranks: int
) -> None:
    requests = [build_requests(rank, 3) for rank in range(num_ranks)]
    started.append(Ranks(settings_of(MODELS["tiny"]), requests, dies=(1, 2)))
    started[0].processes[1].join(WAIT_S)
    died_at = time.monotonic()
    answers = started[0].answers(num_ranks - 1)
    assert time.monotonic() - died_at < WAIT_S / 4, "told by the connection, not by the timeout"
    assert sorted(answers) == [rank for rank in range(num_ranks) if rank != 1]
    assert all(type(answer) is PeerLost for answer in answers.values())


def test_a_rank_that_falls_out_of_a_step_by_a_mistake_leaves_nobody_waiting(started: list[Ranks]) -> None:
    requests = [build_requests(rank, 2) for rank in range(2)]
    ranks = Ranks(settings_of(MODELS["tiny"]), requests, dies=(1, 2), die=break_a_rule)
    started.append(ranks)
    answers = ranks.answers(1)
    told_at = time.monotonic()
    answers |= ranks.answers(1)
    assert time.monotonic() - told_at < WAIT_S / 4
    assert type(answers[0]) is PeerLost
    assert type(answers[1]) is EngineDead
    assert "ValueError: rows: expected [n, 3]" in str(answers[1])


@pytest.mark.parametrize(
    ("is_on_device", "seconds", "kind"),
    [(True, 30.0, PeerLost), (True, 29.0, EngineDead), (True, 0.0, EngineDead), (False, 30.0, EngineDead)],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_device_that_waited_for_another_rank_in_vain_did_not_fail_itself(
    monkeypatch: pytest.MonkeyPatch, is_on_device: bool, seconds: float, kind: type[EngineDead], is_late: bool
) -> None:
    """Such a wait ends as any failure of a device does, and is told by how long the step took until then."""
    now = 1000.0
    place = ReplicaPlace(rank=0, num_ranks=2, host="", port=1, timeout_s=30.0)
    engine = LLMEngine.build(EngineConfig(**settings_of(MODELS["tiny"])))
    group = ExpertGroup(place, num_experts=16, num_layers=engine.runner.shape.num_layers, clock=lambda: now)
    monkeypatch.setattr(group, "swap", lambda blocks: blocks)  # the other rank tells the same
    monkeypatch.setattr(group, "peers", object() if is_on_device else None)
    monkeypatch.setattr(engine.runner, "group", group)
    (request,) = build_requests(1, 1)
    engine.add_request(request)
    engine.step()
    now += 100.0  # between two steps nobody waits on a device

    def fail(*_: object) -> None:
        nonlocal now
        now += seconds
        raise RuntimeError("CUDA error: unspecified launch failure")

    if is_late:
        monkeypatch.setattr(engine.runner, "await_device", fail)
    else:
        monkeypatch.setattr(engine.runner.model, "forward", fail)
    with pytest.raises(EngineDead) as told:
        engine.try_step_only([request.request_id])
    assert type(told.value) is kind


def test_who_waits_for_a_rank_that_stands_still_says_so(started: list[Ranks]) -> None:
    requests = [build_requests(rank, 2) for rank in range(4)]
    ranks = Ranks(settings_of(MODELS["tiny"]), requests, dies=(1, 2), die=stand_still, timeout_s=10.0)
    started.append(ranks)
    answers = ranks.answers(3)
    assert sorted(answers) == [0, 2, 3]
    assert all(type(answer) is PeerLost for answer in answers.values())


def test_ranks_of_other_settings_are_refused(started: list[Ranks]) -> None:
    model = MODELS["tiny"]
    started.append(Ranks([settings_of(model), settings_of(model, dtype="bfloat16")], [[], []]))
    for answer in started[0].answers(2).values():
        assert type(answer) is ConfigError


def test_a_rank_that_nobody_joins_is_dead_and_experts_are_split_evenly() -> None:
    place = ReplicaPlace(rank=0, num_ranks=3, host="127.0.0.1", port=1)
    with pytest.raises(ConfigError, match="16 experts cannot be split evenly among 3 ranks"):
        ExpertGroup(place, num_experts=16, num_layers=1)
    rendezvous = host_rendezvous("127.0.0.1")
    lonely = ReplicaPlace(
        rank=1, num_ranks=2, host="127.0.0.1", port=rendezvous.port, start_timeout_s=0.2, timeout_s=WAIT_S
    )
    with pytest.raises(PeerLost, match="did not find each other"):
        LLMEngine.build(EngineConfig(**settings_of(MODELS["tiny"])), lonely)
    with pytest.raises(ValueError, match=r"rank must lie in 0\.\.1"):
        ReplicaPlace(rank=2, num_ranks=2, host="", port=1)


@pytest.mark.multi_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "impl", "path"),
    [
        ("release", "triton", "peer_memory"),
        ("row", "triton", "peer_memory"),
        ("none", "triton", "peer_memory"),
        ("row", "torch", "all_to_all"),
    ],
)
def test_two_gpus_give_the_bits_of_one(started: list[Ranks], mode: str, impl: str, path: str) -> None:
    settings = settings_of(
        MODELS["tiny-quant"],
        device="cuda",
        dtype="bfloat16",
        kernel_impl=impl,
        activation_quantisation=mode,
    )
    requests = [build_requests(seed, count, max_tokens=12) for seed, count in enumerate((6, 1))]
    started.append(Ranks(settings, requests))
    wanted = alone(settings | {"cuda_graphs": False}, [request for own in requests for request in own])
    answers = started[0].answers(6 if impl == "triton" else 4)
    if impl == "triton":
        assert min(answers[f"replays of {rank}"] for rank in range(2)) > 0
    assert [answers[f"path of {rank}"] for rank in range(2)] == [path, path]
    for rank, own in enumerate(requests):
        assert answers[rank] == {request.request_id: wanted[request.request_id] for request in own}
