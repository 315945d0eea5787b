"""PrefixCache: the index from token content to cached blocks, a tree of full blocks.

A node stands for one block of tokens behind one exact chain of earlier blocks. The hash only finds
candidates: parent and tokens are compared in full, so a collision is harmless. Which blocks are
free, held or evicted is the block manager's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.config import KV_BLOCK_SIZE

HashFunction = Callable[[int, tuple[int, ...]], int]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One full block of known content; on the device, in host memory, or both, while it is in the tree.

    ``device_refs`` counts the running sequences whose table names ``device_block``; ``host_refs`` the
    offloaded sequences that will need ``host_block`` again. A copy without references may be evicted.
    ``snapshot`` is the host state slot that holds the rings as of this block's end.
    """

    parent: PrefixNode | None
    tokens: tuple[int, ...]
    key: int
    num_tokens: int
    children: dict[PrefixNode, None] = field(default_factory=dict)
    device_block: int | None = None
    device_refs: int = 0
    host_block: int | None = None
    host_refs: int = 0
    snapshot: int | None = None
    num_end_hits: int = 0
    last_end_seq_id: int = -1

    def note_hit_end(self, seq_id: int) -> None:
        """A sequence parted from the cached content here; counted once for each sequence in a row."""
        if self.last_end_seq_id != seq_id:
            self.last_end_seq_id = seq_id
            self.num_end_hits += 1


def hash_block(parent_key: int, tokens: tuple[int, ...]) -> int:
    """The default hash. Built-in: the same in every process for whole numbers, and fast."""
    return hash((parent_key, tokens))


class PrefixCache:
    """Finds, adds and removes nodes. Every node's ancestors are in the tree as well."""

    def __init__(self, hash_function: HashFunction = hash_block) -> None:
        self._hash = hash_function
        self._buckets: dict[int, list[PrefixNode]] = {}

    def find(self, parent: PrefixNode | None, tokens: tuple[int, ...]) -> PrefixNode | None:
        """The node for ``tokens`` behind ``parent``, if there is one."""
        return self._find(self._key(parent, tokens), parent, tokens)

    def match(self, token_ids: SequenceOf[int], max_tokens: int) -> list[PrefixNode]:
        """The longest chain of nodes that ``token_ids`` starts with, at most ``max_tokens`` long."""
        chain: list[PrefixNode] = []
        parent: PrefixNode | None = None
        for start in range(0, max_tokens - KV_BLOCK_SIZE + 1, KV_BLOCK_SIZE):
            parent = self.find(parent, tuple(token_ids[start : start + KV_BLOCK_SIZE]))
            if parent is None:
                break
            chain.append(parent)
        return chain

    def insert(self, parent: PrefixNode | None, tokens: tuple[int, ...]) -> PrefixNode:
        """A new node, which must not exist yet."""
        key = self._key(parent, tokens)
        assert self._find(key, parent, tokens) is None, "a prefix node was inserted twice"
        num_tokens = len(tokens) + (parent.num_tokens if parent is not None else 0)
        node = PrefixNode(parent=parent, tokens=tokens, key=key, num_tokens=num_tokens)
        self._buckets.setdefault(key, []).append(node)
        if parent is not None:
            parent.children[node] = None
        return node

    def remove(self, node: PrefixNode) -> None:
        """Take out a node without children."""
        assert not node.children, "a prefix node was removed before its children"
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        if node.parent is not None:
            del node.parent.children[node]

    def __iter__(self) -> Iterator[PrefixNode]:
        for bucket in self._buckets.values():
            yield from bucket

    def check_integrity(self) -> None:
        """Each node's ancestors and children are in the tree and agree."""
        nodes = set(self)
        for node in nodes:
            parent = node.parent
            assert parent is None or (parent in nodes and node in parent.children)
            assert all(child in nodes and child.parent is node for child in node.children)
            assert node.num_tokens == len(node.tokens) + (parent.num_tokens if parent is not None else 0)

    def _key(self, parent: PrefixNode | None, tokens: tuple[int, ...]) -> int:
        return self._hash(parent.key if parent is not None else 0, tokens)

    def _find(self, key: int, parent: PrefixNode | None, tokens: tuple[int, ...]) -> PrefixNode | None:
        for node in self._buckets.get(key, ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None


def post_order(root: PrefixNode) -> list[PrefixNode]:
    """``root`` and everything below it, children before parents."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children)
    order.reverse()
    return order
