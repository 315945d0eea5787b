"""The block manager from outside: who holds what, which copies it asks for, and what its check notices."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.api import Request, SamplingParams
from engine.block_manager import BlockManager, Move
from engine.config import KV_BLOCK_SIZE
from engine.sequence import Sequence


def build_manager(num_blocks: int = 8, num_host_blocks: int = 0, num_host_states: int = 0) -> BlockManager:
    return BlockManager(
        num_blocks, num_states=4, num_host_blocks=num_host_blocks, num_host_states=num_host_states
    )


def run_prompt(manager: BlockManager, seq_id: int, tokens: list[int]) -> Sequence:
    """Start a sequence on what is cached of its prompt, and compute and publish the rest."""
    request = Request(
        request_id=f"r#{seq_id}", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=64)
    )
    seq = Sequence.build(request, sample_index=0, seq_id=seq_id, max_model_len=4096)
    manager.start(seq, manager.match_prefix(tokens, len(tokens) - 1), None)
    seq.cached_until = len(seq.nodes) * KV_BLOCK_SIZE
    manager.grow(seq, len(tokens))
    seq.num_computed_tokens = len(tokens)
    manager.publish(seq)
    return seq


def block_moves(manager: BlockManager) -> list[tuple[str, str]]:
    moves = [(m.source_place, m.target_place) for m in manager.moves if m.kind == "block"]
    manager.moves = []
    return moves


def tokens_of(*names: int) -> list[int]:
    """One full block for each name, and one token more."""
    return [token for name in names for token in [name] * KV_BLOCK_SIZE] + [0]


def test_a_second_sequence_shares_full_blocks_and_frees_them_last() -> None:
    manager = build_manager()
    first = run_prompt(manager, 0, tokens_of(1, 2))
    second = run_prompt(manager, 1, tokens_of(1, 3))
    assert first.block_table[0] == second.block_table[0]
    assert len({*first.block_table, *second.block_table}) == 5
    manager.check_integrity([first, second])
    manager.release(first)
    assert manager.num_available_blocks == 8 - 3
    manager.release(second)
    assert manager.num_available_blocks == 8
    manager.check_integrity([])
    assert len(manager.match_prefix(tokens_of(1, 2), 129)) == 2


def test_a_hit_is_whole_blocks_and_leaves_one_token_to_run() -> None:
    manager = build_manager()
    run_prompt(manager, 0, tokens_of(1, 2))
    assert [len(manager.match_prefix(tokens_of(1, 2), limit)) for limit in (63, 64, 127, 128, 500)] == [
        0,
        1,
        1,
        2,
        2,
    ]


def test_the_same_block_behind_another_prefix_is_no_hit() -> None:
    manager = build_manager()
    run_prompt(manager, 0, tokens_of(1, 2))
    assert manager.match_prefix(tokens_of(3, 2), 128) == []


def test_equal_hashes_of_different_tokens_are_told_apart() -> None:
    manager = BlockManager(16, num_states=4, hash_function=lambda parent_key, tokens: 0)
    sequences = [run_prompt(manager, i, tokens_of(i, 5)) for i in range(3)]
    assert len({block for seq in sequences for block in seq.block_table}) == 9
    for seq in sequences:
        assert [n.device_block for n in manager.match_prefix(seq.token_ids, 128)] == list(seq.block_table[:2])
    assert manager.match_prefix(tokens_of(9, 5), 128) == []
    manager.check_integrity(sequences)


def test_content_computed_twice_ends_in_one_block() -> None:
    manager = build_manager()
    tokens = tokens_of(1, 2)
    twins = []
    for seq_id in range(2):
        request = Request(request_id=f"r#{seq_id}", prompt_token_ids=tokens)
        seq = Sequence.build(request, sample_index=0, seq_id=seq_id, max_model_len=4096)
        manager.start(seq, [], None)
        manager.grow(seq, len(tokens))
        seq.num_computed_tokens = len(tokens)
        twins.append(seq)
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    for seq in twins:
        manager.publish(seq)
        manager.check_integrity(twins)
    assert twins[0].block_table[:2] == twins[1].block_table[:2]
    assert manager.num_available_blocks == 8 - 4


def test_the_least_recently_used_chain_goes_first_from_its_end() -> None:
    manager = build_manager(num_blocks=6)
    for seq_id, names in enumerate([(1, 2), (3, 4)]):
        manager.release(run_prompt(manager, seq_id, tokens_of(*names)))
    manager.release(run_prompt(manager, 2, [*tokens_of(1)[:64], 7]))  # uses (1) again
    manager.release(run_prompt(manager, 3, tokens_of(8)))
    lengths = [len(manager.match_prefix(tokens_of(*names), 128)) for names in [(1, 2), (3, 4), (8, 0)]]
    assert lengths == [2, 2, 1]
    manager.release(run_prompt(manager, 4, tokens_of(9, 9)))
    lengths = [len(manager.match_prefix(tokens_of(*names), 128)) for names in [(1, 2), (3, 4), (8, 0)]]
    assert lengths == [1, 1, 1]
    assert block_moves(manager) == []
    manager.check_integrity([])


def test_evicted_blocks_go_to_host_memory_and_come_back() -> None:
    manager = build_manager(num_blocks=4, num_host_blocks=4)
    manager.release(run_prompt(manager, 0, tokens_of(1, 2)))
    manager.release(run_prompt(manager, 1, tokens_of(3, 4, 5)))
    assert block_moves(manager) == [("device", "host")] * 2
    again = run_prompt(manager, 2, tokens_of(1, 2))
    moves = block_moves(manager)
    assert moves.count(("host", "device")) == 2
    assert again.cached_until == 128
    manager.check_integrity([again])


def test_a_block_with_a_host_copy_is_evicted_without_a_move() -> None:
    manager = build_manager(num_blocks=4, num_host_blocks=8)
    for seq_id in range(3):
        manager.release(run_prompt(manager, seq_id, tokens_of(1 + seq_id % 2, 2, 3)))
    block_moves(manager)
    manager.release(run_prompt(manager, 3, tokens_of(2, 2, 3)))
    assert set(block_moves(manager)) == {("host", "device")}


@pytest.mark.parametrize("is_cached", [True, False])
def test_offload_and_resume_move_every_block_once(is_cached: bool) -> None:
    manager = BlockManager(8, 2, num_host_blocks=8, num_host_states=1, enable_prefix_caching=is_cached)
    seq = run_prompt(manager, 0, tokens_of(1, 2))
    table = list(seq.block_table)
    assert manager.try_offload(seq)
    manager.check_integrity([seq])
    assert [m.source for m in manager.moves if m.kind == "block"] == table
    assert [m for m in manager.moves if m.kind == "state"] == [
        Move("state", "device", "host", 0, 0)
    ] or is_cached
    assert manager.num_available_blocks == 8
    # Somebody else takes the whole pool meanwhile.
    other = run_prompt(manager, 1, [9] * 8 * KV_BLOCK_SIZE)
    manager.check_integrity([seq, other])
    manager.release(other)
    manager.moves = []
    manager.resume(seq)
    manager.check_integrity([seq])
    assert sum(m.kind == "block" and m.target_place == "device" for m in manager.moves) == 3
    assert len(seq.block_table) == 3
    manager.release(seq)
    manager.check_integrity([])


@pytest.mark.parametrize(("num_host_blocks", "num_host_states"), [(2, 1), (3, 0), (0, 0)])
def test_offload_without_room_changes_nothing(num_host_blocks: int, num_host_states: int) -> None:
    manager = build_manager(num_host_blocks=num_host_blocks, num_host_states=num_host_states)
    seq = run_prompt(manager, 0, tokens_of(1, 2))
    table = list(seq.block_table)
    assert not manager.try_offload(seq)
    assert list(seq.block_table) == table
    assert not seq.is_offloaded
    assert manager.moves == []
    manager.check_integrity([seq])


def test_what_an_offloaded_sequence_needs_is_not_evicted_from_host_memory() -> None:
    manager = build_manager(num_blocks=4, num_host_blocks=3, num_host_states=1)
    seq = run_prompt(manager, 0, tokens_of(1, 2))
    assert manager.try_offload(seq)
    for seq_id in range(1, 4):
        manager.release(run_prompt(manager, seq_id, tokens_of(10 + seq_id, 5, 5)))
        manager.check_integrity([seq])
    manager.moves = []
    manager.resume(seq)
    assert len([m for m in manager.moves if m.kind == "block" and m.target_place == "device"]) == 3


def test_a_snapshot_is_restored_and_gives_way_to_a_newer_one() -> None:
    manager = build_manager(num_host_blocks=0, num_host_states=1)
    seq = run_prompt(manager, 0, tokens_of(1, 2))
    slot = manager.states.try_take_host()
    assert slot is not None
    manager.states.keep_snapshot(seq.nodes[1], slot)
    manager.check_integrity([seq])
    manager.release(seq)
    request = Request(request_id="r", prompt_token_ids=tokens_of(1, 2))
    again = Sequence.build(request, sample_index=0, seq_id=1, max_model_len=4096)
    nodes = manager.match_prefix(again.token_ids, 128)
    manager.start(again, nodes, nodes[1])
    assert manager.moves == [Move("state", "host", "device", slot, again.state_slot or 0)]
    assert manager.states.try_take_host() == slot
    assert nodes[1].snapshot is None


def lose_a_block(manager: BlockManager, seq: Sequence) -> None:
    seq.block_table.pop()


def share_a_private_block(manager: BlockManager, seq: Sequence) -> None:
    seq.block_table[-1] = seq.block_table[0]


def miscount_references(manager: BlockManager, seq: Sequence) -> None:
    seq.nodes[0].device_refs += 1


def lose_a_state_slot(manager: BlockManager, seq: Sequence) -> None:
    seq.state_slot = None


def swap_a_shared_block(manager: BlockManager, seq: Sequence) -> None:
    seq.block_table[0], seq.block_table[1] = seq.block_table[1], seq.block_table[0]


@pytest.mark.parametrize(
    "damage",
    [lose_a_block, share_a_private_block, miscount_references, lose_a_state_slot, swap_a_shared_block],
)
def test_the_integrity_check_notices_damage(damage: Callable[[BlockManager, Sequence], None]) -> None:
    manager = build_manager()
    seq = run_prompt(manager, 0, tokens_of(1, 2))
    manager.check_integrity([seq])
    damage(manager, seq)
    with pytest.raises(AssertionError):
        manager.check_integrity([seq])


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_keep_every_count_right(seed: int) -> None:
    """Start, offload, resume and release at random, hundreds of times. The test's id is its seed."""
    rng = random.Random(seed)
    manager = build_manager(num_blocks=12, num_host_blocks=rng.choice([0, 3, 9, 30]), num_host_states=3)
    live: list[Sequence] = []
    for seq_id in range(400):
        running = [seq for seq in live if not seq.is_offloaded]
        seq = rng.choice(live) if live else None
        tokens = tokens_of(*(rng.randrange(2) for _ in range(rng.randrange(1, 5))))
        if seq is not None and rng.random() < 0.5:
            if rng.random() < 0.3:
                manager.release(seq)
                live.remove(seq)
            elif not seq.is_offloaded:
                manager.try_offload(seq)
            elif len(running) < 4 and manager.can_hold(seq.nodes, len(seq.host_blocks), 0):
                manager.resume(seq)
        elif len(running) < 4 and manager.can_hold([], len(tokens) // KV_BLOCK_SIZE + 1, 0):
            live.append(run_prompt(manager, seq_id, tokens))
        manager.check_integrity(live)


def test_a_host_block_taken_twice_in_one_run_is_copied_to_once() -> None:
    manager = build_manager(num_blocks=4, num_host_blocks=1)
    manager.release(run_prompt(manager, 0, tokens_of(1, 2)))
    manager.release(run_prompt(manager, 1, tokens_of(3, 4, 5)))
    assert len(manager.moves) == 2
    assert len(manager.take_moves()) == 1
    assert manager.take_moves() == []
    manager.check_integrity([])
