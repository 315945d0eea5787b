"""Ranks as Ray actors: what is said of one that died."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from engine import EngineDead
from jobs.fleet import describe_death


def test_a_death_is_told_in_the_engines_words_or_in_two_short_lines() -> None:
    broken = RayTaskError("exchange", "a traceback of many lines", EngineDead("the step failed: no memory"))
    assert describe_death(broken) == "the step failed: no memory"
    advice = "\n".join(["The actor died.", *(f"\tdetail {i}: {'x' * 80}" for i in range(20)), "y " * 400])
    text = describe_death(RayActorError(error_msg=advice))
    assert text
    assert "\n" not in text
    assert len(text) < 600
    assert "detail 7" not in text
