"""Which sizes of decode steps are kept as graphs, and the sizes of rooms: decided without a GPU."""

from __future__ import annotations

import logging
import random
from collections import deque

import pytest

from engine.config import ROW_PADDING, padded
from engine.decode_rooms import MAX_ROWS, GraphPlaces, StepKind, room_rows, room_tokens

LAUNCH, CAPTURE, REPLAY = StepKind.LAUNCH, StepKind.CAPTURE, StepKind.REPLAY


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 128, 129, 300, MAX_ROWS])
def test_rooms_have_space_and_few_sizes(num_rows: int) -> None:
    assert num_rows <= room_rows(num_rows, 8192) < num_rows + 128
    assert num_rows <= room_rows(num_rows, padded(num_rows)) <= padded(num_rows)
    assert room_rows(num_rows, padded(num_rows)) % ROW_PADDING == 0
    assert len({room_rows(n, 8192) for n in range(1, MAX_ROWS + 1)}) <= 8


@pytest.mark.parametrize("num_tokens", [1, 1024, 1025, 2**20])
def test_a_context_fits_its_room(num_tokens: int) -> None:
    assert num_tokens <= room_tokens(num_tokens) <= max(1024, 2 * num_tokens)


def kinds(places: GraphPlaces, sizes: str) -> list[StepKind]:
    return [places.next_step(size) for size in sizes]


def test_a_size_is_captured_when_it_comes_again() -> None:
    assert kinds(GraphPlaces(), "aabab") == [LAUNCH, CAPTURE, LAUNCH, REPLAY, CAPTURE]


def test_sizes_that_came_once_take_no_place() -> None:
    places = GraphPlaces(num_places=2, patience=100)
    assert kinds(places, "abcdefghij") == [LAUNCH] * 10
    assert kinds(places, "cjcjcj") == [CAPTURE, CAPTURE, REPLAY, REPLAY, REPLAY, REPLAY]


def test_what_was_longest_not_replayed_gives_way() -> None:
    places = GraphPlaces(num_places=2, patience=4)
    kinds(places, "bbaa")
    assert kinds(places, "a" + "b" * 5 + "cc")[-2:] == [LAUNCH, CAPTURE]
    assert [size in places for size in "abc"] == [False, True, True]
    # It has come before: a place is all that it waits for.
    assert kinds(places, "ccccccaa") == [REPLAY] * 6 + [CAPTURE, REPLAY]
    assert "b" not in places


def test_going_round_among_more_sizes_than_places_captures_none_anew() -> None:
    places = GraphPlaces(num_places=4, patience=16)
    found = kinds(places, "abcde" * 40)
    assert found.count(CAPTURE) == 4
    assert found[-5:] == [REPLAY] * 4 + [LAUNCH]


def test_that_places_ran_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    places = GraphPlaces(num_places=2, patience=1)
    with caplog.at_level(logging.INFO):
        kinds(places, "aabb")
        assert not caplog.records
        kinds(places, "ccdd" * 5)
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps have more sizes than the 2 kept as graphs"
    ]


def test_captures_are_as_rare_as_patience_says() -> None:
    """Of any steps: no more graphs than places, and of captures in ``patience`` steps too; each is replayed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_places, patience = rng.randint(1, 6), rng.randint(1, 40)
    places, recent, graphs = GraphPlaces(num_places, patience), deque[StepKind](maxlen=patience), set[int]()
    for _ in range(4000):
        size = min(int(rng.expovariate(0.2)), 30)
        kind = places.next_step(size)
        recent.append(kind)
        graphs = {other for other in graphs if other in places} | ({size} if kind is CAPTURE else set())
        assert (kind is LAUNCH) == (size not in graphs)
        assert len(graphs) <= num_places
        assert recent.count(CAPTURE) <= num_places
