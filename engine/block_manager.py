"""BlockManager: who owns which KV block on the device and in host memory, and which moves that takes.

It keeps free lists, reference counts and least-recently-used orders, and writes down the copies the
device has to make, in order. Policy (who is admitted, who gives way) is the scheduler's.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from engine.config import KV_BLOCK_SIZE
from engine.prefix_cache import HashFunction, PrefixCache, PrefixNode, hash_block, post_order
from engine.sequence import Sequence
from engine.state_slots import StateSlots

Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one KV block, or one state slot, from ``source`` at ``source_place`` to ``target``."""

    kind: Literal["block", "state"]
    source_place: Place
    target_place: Place
    source: int
    target: int


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // KV_BLOCK_SIZE)


class BlockManager:
    """Both tiers of KV blocks, and the state slots beside them.

    A device block is free, private to one running sequence, or a prefix node's. A node's block that no
    running sequence names stays cached until its room is needed; then its content goes to host memory,
    if there is room, or is forgotten. Because copies run in the order of ``moves``, before the step's
    own writes, a block may be handed on as soon as the copy that empties it has been written down.
    """

    def __init__(
        self,
        num_blocks: int,
        num_states: int,
        *,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.states = StateSlots(num_states, num_host_states)
        self.cache = PrefixCache(hash_function)
        self.moves: list[Move] = []
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[PrefixNode, None] = OrderedDict()
        self._host_free = list(reversed(range(num_host_blocks)))
        self._host_cached: OrderedDict[PrefixNode, None] = OrderedDict()

    # Questions

    @property
    def num_available_blocks(self) -> int:
        """Device blocks that can be had now: the free, and the cached ones nobody names."""
        return len(self._free) + len(self._cached)

    def match_prefix(self, token_ids: SequenceOf[int], max_tokens: int) -> list[PrefixNode]:
        """The cached chain that ``token_ids`` starts with, at most ``max_tokens`` tokens of it."""
        return self.cache.match(token_ids, max_tokens) if self.enable_prefix_caching else []

    def can_hold(self, nodes: Iterable[PrefixNode], num_blocks: int, num_spare: int) -> bool:
        """Whether a table of ``num_blocks``, the first of them ``nodes``, fits and leaves ``num_spare``."""
        on_device = [node for node in nodes if node.device_block is not None]
        num_idle = sum(node.device_refs == 0 for node in on_device)
        return self.num_available_blocks - num_idle >= num_blocks - len(on_device) + num_spare

    # A sequence's life

    def start(self, seq: Sequence, nodes: SequenceOf[PrefixNode], snapshot: PrefixNode | None) -> None:
        """Give ``seq`` a state slot and the cached ``nodes`` as the head of its table."""
        assert not seq.block_table, "a running sequence was started again"
        self._hold(nodes)
        seq.nodes = list(nodes)
        seq.block_table = array("q", map(_device_block, nodes))
        seq.state_slot = self.states.take_device()
        if snapshot is not None:
            slot = self.states.read_snapshot(snapshot)
            self.moves.append(Move("state", "host", "device", slot, seq.state_slot))

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the table to hold ``num_tokens``; the caller has made sure there is room."""
        while len(seq.block_table) < num_blocks_for(num_tokens):
            seq.block_table.append(self._take_block())

    def publish(self, seq: Sequence) -> None:
        """Enter the full computed blocks of ``seq`` into the prefix cache.

        Where another sequence published the same content first, its block replaces ours: the bits are
        the same, and every sequence's published blocks thus form one chain of nodes.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(len(seq.nodes), seq.num_computed_tokens // KV_BLOCK_SIZE):
            start = index * KV_BLOCK_SIZE
            tokens = tuple(seq.token_ids[start : start + KV_BLOCK_SIZE])
            parent = seq.nodes[-1] if seq.nodes else None
            node = self.cache.find(parent, tokens) or self.cache.insert(parent, tokens)
            if node.device_block is None:
                node.device_block = seq.block_table[index]
            else:
                self._cached.pop(node, None)
                self._free.append(seq.block_table[index])
                seq.block_table[index] = node.device_block
            node.device_refs += 1
            seq.nodes.append(node)

    def release(self, seq: Sequence) -> None:
        """Take back all that ``seq`` holds, on either side. Published blocks stay cached."""
        self._release_device(seq)
        self._release_host(seq)
        seq.nodes = []

    def try_offload(self, seq: Sequence) -> bool:
        """Move a running sequence to host memory and free its device memory; False when there is no room."""
        num_filled = num_blocks_for(max(seq.num_computed_tokens, seq.cached_until))
        nodes, private = seq.nodes, seq.block_table[len(seq.nodes) : num_filled]
        self._pin_host(nodes)
        num_copies = sum(node.host_block is None for node in nodes) + len(private)
        has_room = num_copies <= len(self._host_free) + len(self._host_cached)
        slot = self.states.try_take_host() if has_room else None
        if slot is None:
            self._unpin_host(nodes)
            return False
        assert seq.state_slot is not None
        for node in nodes:
            if node.host_block is None:
                node.host_block = self._copy_to_host(_device_block(node))
        seq.host_blocks = [_host_block(node) for node in nodes]
        seq.host_blocks += [self._copy_to_host(block) for block in private]
        self.moves.append(Move("state", "device", "host", seq.state_slot, slot))
        self._release_device(seq)
        seq.host_state = slot
        return True

    def resume(self, seq: Sequence) -> None:
        """Bring an offloaded sequence back; the caller has made sure there is room."""
        assert seq.host_state is not None, "only an offloaded sequence can resume"
        self._hold(seq.nodes)
        seq.block_table = array("q", map(_device_block, seq.nodes))
        for block in seq.host_blocks[len(seq.nodes) :]:
            seq.block_table.append(self._take_block())
            self.moves.append(Move("block", "host", "device", block, seq.block_table[-1]))
        seq.state_slot = self.states.take_device()
        self.moves.append(Move("state", "host", "device", seq.host_state, seq.state_slot))
        self._release_host(seq)

    def take_moves(self) -> list[Move]:
        """The copies written down since the last call, without those that are overwritten unread."""
        runs = groupby(self.moves, key=lambda move: (move.kind, move.source_place))
        self.moves = []
        return [move for _, run in runs for move in {move.target: move for move in run}.values()]

    # Device blocks

    def _hold(self, nodes: SequenceOf[PrefixNode]) -> None:
        """Reference ``nodes`` on the device, bringing back those that are in host memory only."""
        absent = [node for node in nodes if node.device_block is None]
        for node in nodes:
            node.device_refs += 1
            self._cached.pop(node, None)
        # Until its copy is written down, nothing may evict an absent node from host memory.
        self._pin_host(absent)
        for node in absent:
            block = self._take_block()
            self.moves.append(Move("block", "host", "device", _host_block(node), block))
            node.device_block = block
        self._unpin_host(absent)

    def _release_device(self, seq: Sequence) -> None:
        num_nodes = len(seq.nodes) if seq.block_table else 0
        self._free.extend(reversed(seq.block_table[num_nodes:]))
        # Deepest first, so that a chain is evicted from its end and never cut in the middle.
        for node in reversed(seq.nodes[:num_nodes]):
            node.device_refs -= 1
            if node.device_refs == 0:
                self._cached[node] = None
        seq.block_table = array("q")
        if seq.state_slot is not None:
            self.states.free_device(seq.state_slot)
            seq.state_slot = None

    def _take_block(self) -> int:
        while not self._free:
            self._evict_one()
        return self._free.pop()

    def _evict_one(self) -> None:
        """Free the least recently used cached block, its content going to host memory where possible."""
        node = next(iter(self._cached))
        if node.host_block is None:
            host_block = self._try_take_host_block()
            if node not in self._cached:
                # Making room dropped a chain that this node was part of; its block is free already.
                if host_block is not None:
                    self._host_free.append(host_block)
                return
            if host_block is None:
                self._drop(node)
                return
            self.moves.append(Move("block", "device", "host", _device_block(node), host_block))
            node.host_block = host_block
            self._host_cached[node] = None
        del self._cached[node]
        self._free.append(_device_block(node))
        node.device_block = None

    def _drop(self, root: PrefixNode) -> None:
        """Forget ``root`` and all that depends on it. A held node's ancestors are held, so none is held."""
        for node in post_order(root):
            assert node.device_refs == node.host_refs == 0, "a held prefix node was dropped"
            if node.device_block is not None:
                del self._cached[node]
                self._free.append(node.device_block)
                node.device_block = None
            if node.host_block is not None:
                del self._host_cached[node]
                self._host_free.append(node.host_block)
                node.host_block = None
            self.states.drop_snapshot(node)
            self.cache.remove(node)

    # Host blocks

    def _pin_host(self, nodes: Iterable[PrefixNode]) -> None:
        for node in nodes:
            node.host_refs += 1
            self._host_cached.pop(node, None)

    def _unpin_host(self, nodes: SequenceOf[PrefixNode]) -> None:
        for node in reversed(nodes):
            node.host_refs -= 1
            if node.host_refs == 0 and node.host_block is not None:
                self._host_cached[node] = None

    def _try_take_host_block(self) -> int | None:
        if not self._host_free and self._host_cached:
            self._evict_one_from_host()
        return self._host_free.pop() if self._host_free else None

    def _evict_one_from_host(self) -> None:
        node = next(iter(self._host_cached))
        if node.device_block is None:
            self._drop(node)
            return
        del self._host_cached[node]
        self._host_free.append(_host_block(node))
        node.host_block = None

    def _copy_to_host(self, block: int) -> int:
        host_block = self._try_take_host_block()
        assert host_block is not None, "the room in host memory was miscounted"
        self.moves.append(Move("block", "device", "host", block, host_block))
        return host_block

    def _release_host(self, seq: Sequence) -> None:
        if seq.host_state is None:
            return
        self._host_free.extend(reversed(seq.host_blocks[len(seq.nodes) :]))
        self._unpin_host(seq.nodes)
        self.states.free_host(seq.host_state)
        seq.host_blocks, seq.host_state = [], None

    # Self-check

    def check_integrity(self, sequences: Iterable[Sequence], pending_states: Iterable[int] = ()) -> None:
        """Every block and slot is free, cached or held, exactly once; the counts equal the holders."""
        live = list(sequences)
        nodes = list(self.cache)
        self.cache.check_integrity()
        self.states.check_integrity(live, pending_states)
        device_refs = Counter(node for seq in live if seq.block_table for node in seq.nodes)
        host_refs = Counter(node for seq in live if seq.host_state is not None for node in seq.nodes)
        for node in nodes:
            assert node.device_block is not None or node.host_block is not None, "a node without a block"
            assert node.device_refs == device_refs[node], "device references and tables disagree"
            assert node.host_refs == host_refs[node], "host references and offloaded sequences disagree"
            assert (node in self._cached) == (node.device_block is not None and node.device_refs == 0)
            assert (node in self._host_cached) == (node.host_block is not None and node.host_refs == 0)
        named = {*device_refs, *host_refs, *self._cached, *self._host_cached}
        assert named <= set(nodes), "a node in use is not in the tree"
        device, host = list(self._free), list(self._host_free)
        device += [node.device_block for node in nodes if node.device_block is not None]
        host += [node.host_block for node in nodes if node.host_block is not None]
        for seq in live:
            num_nodes = len(seq.nodes)
            device += seq.block_table[num_nodes:]
            host += seq.host_blocks[num_nodes:]
            shared = [node.device_block for node in seq.nodes]
            assert not seq.block_table or list(seq.block_table[:num_nodes]) == shared
            assert not seq.host_blocks or seq.host_blocks[:num_nodes] == [n.host_block for n in seq.nodes]
        assert sorted(device) == list(range(self.num_blocks)), "device blocks are lost or in two places"
        assert sorted(host) == list(range(self.num_host_blocks)), "host blocks are lost or in two places"


def _device_block(node: PrefixNode) -> int:
    assert node.device_block is not None, "the node is not on the device"
    return node.device_block


def _host_block(node: PrefixNode) -> int:
    assert node.host_block is not None, "the node is not in host memory"
    return node.host_block
