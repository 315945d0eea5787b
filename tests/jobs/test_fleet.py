"""Ranks as Ray actors: what is said of one that died."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from engine import EngineDead, PeerLost
from jobs.config import load_job
from jobs.fleet import RayFleet, describe_death
from jobs.rank import RankSpec
from pipelines.rank_protocol import RankDied


def test_a_death_is_told_in_the_engines_words_or_in_two_short_lines() -> None:
    broken = RayTaskError("exchange", "a traceback of many lines", EngineDead("the step failed: no memory"))
    assert describe_death(broken) == "the step failed: no memory"
    advice = "\n".join(["The actor died.", *(f"\tdetail {i}: {'x' * 80}" for i in range(20)), "y " * 400])
    text = describe_death(RayActorError(error_msg=advice))
    assert text
    assert "\n" not in text
    assert len(text) < 600
    assert "detail 7" not in text


@pytest.mark.parametrize(
    ("error", "has_lost_peer"),
    [
        (RayTaskError("exchange", "a traceback", PeerLost("another rank is gone")), True),
        (RayTaskError("exchange", "a traceback", EngineDead("the step failed")), False),
        (RayActorError(error_msg="The actor died."), False),
    ],
)
def test_a_rank_that_only_lost_another_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: RayError, has_lost_peer: bool
) -> None:
    def fail(reference: object) -> None:
        # As Ray raises it: an error of both kinds.
        raise error.as_instanceof_cause() if isinstance(error, RayTaskError) else error

    job = load_job(None, flags={"model.path": "m", "input.path": "i", "output.path": "o"})
    fleet = RayFleet(RankSpec(job=job, run=1), 2, has_gpus=False)
    fleet._exchanges = {"reference": 1}
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    monkeypatch.setattr(ray, "get", fail)
    ((slot, death),) = fleet.wait(0.0)
    assert isinstance(death, RankDied)
    assert (slot, death.has_lost_peer) == (1, has_lost_peer)
