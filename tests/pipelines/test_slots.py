"""What the driver knows of its ranks, as they start, report and die."""

from __future__ import annotations

import pytest

from engine import ConfigError
from pipelines.rank_protocol import LeaseReport, RankReport
from pipelines.slots import Slots


def test_a_slot_knows_its_rank_from_its_start_to_its_death() -> None:
    slots = Slots(2)
    slot = slots[0]
    slot.begin(10.0)
    assert (slots.live, slots.capacities()) == ([slot], {})
    lease = LeaseReport(lease_id=1, num_read=3, num_ok=0, num_error=0)
    slot.take(RankReport(num_turns=1, capacity=8, node="a", leases=(lease,)), 11.0)
    assert (slots.capacities(), slot.moved_at, slot.has_finished_rows) == ({0: 8}, 11.0, False)
    lease = LeaseReport(lease_id=1, num_read=3, num_ok=0, num_error=1)
    slot.take(RankReport(num_turns=1, capacity=8, node="a", leases=(lease,)), 12.0)
    assert slot.moved_at == 11.0, "its loop stands still"
    slot.take(RankReport(num_turns=2, capacity=8, node="a"), 13.0)
    assert (slot.moved_at, slot.has_finished_rows) == (13.0, True)
    slot.lose(14.0)
    assert (slots.live, slots.capacities(), slot.node) == ([], {}, "a")
    slot.begin(15.0)
    assert not slot.has_finished_rows, "that was another rank"


def test_a_loop_that_loads_begins_to_count_when_it_is_ready() -> None:
    slot = Slots(1)[0]
    slot.begin(0.0)
    slot.take(RankReport(num_turns=1, capacity=0), 1.0)
    slot.take(RankReport(num_turns=1, capacity=0), 900.0)
    assert slot.moved_at == 1.0
    slot.take(RankReport(num_turns=1, capacity=8), 1000.0)
    assert slot.moved_at == 1000.0, "an engine is built within one turn"


def test_no_rank_stood_still_while_nobody_looked() -> None:
    slots = Slots(2)
    slots[0].begin(100.0)
    slots[1].begin(400.0)
    slots.excuse(absent_s=300.0, now_s=410.0)
    assert [slot.moved_at for slot in slots] == [400.0, 410.0]


def test_who_will_be_ready_later() -> None:
    slots = Slots(5)
    for number in range(4):
        slots[number].begin(0.0)
    slots[1].take(RankReport(num_turns=1, capacity=8), 1.0)
    slots[2].lose(100.0)
    slots[3].lose(100.0)
    slots[3].is_given_up = True
    assert slots.starting(101.0) == [0, 2], "1 is ready, 3 stays empty, 4 never had a place"
    assert slots.starting(200.0) == [0], "nobody comes in place of 2"


def test_two_ranks_on_one_gpu_are_refused() -> None:
    slots = Slots(2)
    for slot in slots:
        slot.begin(0.0)
    slots[0].take(RankReport(num_turns=1, device="GPU-a"), 1.0)
    slots.check_device(0, "GPU-a")
    slots.check_device(1, "GPU-b")
    slots.check_device(1, "")
    with pytest.raises(ConfigError, match="ranks 0 and 1 were both given the GPU GPU-a"):
        slots.check_device(1, "GPU-a")
    slots[0].lose(2.0)
    slots.check_device(1, "GPU-a")
