"""The directory: which pool node holds which block. Pure; it runs inside the Conductor.

It is soft state, built from what the nodes publish: a wrong entry costs a recomputation, never a
wrong answer. So it knows a block by 64 bits of its hash alone: with ten million blocks, one look-up
in 10^12 takes a block for another, and the pool nodes, which compare whole hashes, find that out.

Life of a node's entries:

1. `add` when the node registers; it sends a snapshot next.
2. `apply` each snapshot part (swapped in when the last one came) and each batch of changes.
3. A batch that is not the next one is a gap: `apply` returns `AskSnapshot`, and the node's
   batches are passed over until the snapshot is there.
4. `drop` when that life of the node is over.

A block's entry is the number of its set of holders (`HolderSets`). A set has a bit for each node
and *lane*: one lane per tier, and one for the parts of a snapshot that is not complete. Swapping a
snapshot in and dropping a node change the sets at once; entries that became empty by that are
taken out of the table a bounded number at a time, beside later calls of `apply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import InvariantError
from core.ids import BLOCK_HASH_BYTES, BlockHash, Incarnation, PoolRef
from core.messages.to_conductor import PoolEvents, PoolSnapshot
from core.messages.to_pool import Tier
from kvpool.block_table import BlockTable, Keys
from kvpool.holder_sets import HolderSets

_LANES = {tier: lane for lane, tier in enumerate(Tier)}
_INCOMING = len(_LANES)
_STRIDE = _INCOMING + 1

_SWEEP_SLOTS = 1 << 15
"""Looked at in one call: some 0.1 ms."""

_MATCH_BLOCKS = 1 << 10
"""Looked up at a time: a match mostly ends long before the prompt does."""


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Send `SendSnapshot` to this node."""

    node: Incarnation


@dataclass(slots=True)
class _Node:
    """A known life. `first` is its bit in lane 0; `seq` is the last batch applied."""

    ref: PoolRef
    first: int
    seq: int = 0
    in_sync: bool = False
    part_seq: int = 0
    part_tier: Tier | None = None

    def bit(self, lane: int) -> int:
        return self.first << lane

    @property
    def bits(self) -> int:
        return self.first * ((1 << _STRIDE) - 1)


class Directory:
    """See the module's docstring. Costs some 15 to 30 bytes a block, whoever holds it."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self._nodes: dict[Incarnation, _Node] = {}
        self._by_first: dict[int, _Node] = {}
        self._table = BlockTable()
        self._sets = HolderSets()
        self._swept = 0

    # --- what the nodes tell ---

    def add(self, ref: PoolRef) -> None:
        """Know a life of a node. Registering again keeps its entries until the new snapshot."""
        if (known := self._nodes.get(ref.incarnation)) is not None:
            known.ref = ref
            known.in_sync = False
            self._abandon_snapshot(known)
            return
        places = (1 << place * _STRIDE for place in range(len(self._by_first) + 1))
        first = next(bit for bit in places if bit not in self._by_first)
        self._nodes[ref.incarnation] = self._by_first[first] = _Node(ref, first)

    def drop(self, incarnation: Incarnation) -> None:
        """Forget a life of a node; an unknown one is passed over."""
        node = self._nodes.pop(incarnation, None)
        if node is None:
            return
        del self._by_first[node.first]
        self._sets.rewrite(node.bits, lambda mask: mask & ~node.bits)

    def apply(
        self, incarnation: Incarnation, message: PoolEvents | PoolSnapshot
    ) -> list[AskSnapshot]:
        """Apply what a node published. Raises `ValueError` for hashes of a wrong size.

        Messages of unknown lives, and batches applied before, change nothing.
        """
        node = self._nodes.get(incarnation)
        if node is None:
            return []
        if isinstance(message, PoolSnapshot):
            self._take_part(node, message)
            return []
        return self._take_batch(node, message)

    def _take_part(self, node: _Node, part: PoolSnapshot) -> None:
        keys = _keys(part.block_hashes)
        if (node.part_tier, node.part_seq) != (part.tier, part.seq):
            self._abandon_snapshot(node)
            node.part_tier, node.part_seq = part.tier, part.seq
        incoming, held = node.bit(_INCOMING), node.bit(_LANES[part.tier])
        self._set(keys, incoming)
        if not part.last:
            return
        both = incoming | held
        self._sets.rewrite(both, lambda m: m & ~both | (held if m & incoming else 0))
        node.part_tier = None
        node.seq, node.in_sync = part.seq, True

    def _abandon_snapshot(self, node: _Node) -> None:
        if node.part_tier is not None:
            incoming = node.bit(_INCOMING)
            self._sets.rewrite(incoming, lambda mask: mask & ~incoming)
            node.part_tier = None

    def _take_batch(self, node: _Node, batch: PoolEvents) -> list[AskSnapshot]:
        if not node.in_sync or batch.seq <= node.seq:
            return []
        if batch.seq != node.seq + 1 or node.part_tier is not None:
            self.num_gaps += 1
            node.in_sync = False
            self._abandon_snapshot(node)
            return [AskSnapshot(node.ref.incarnation)]
        added, removed = _keys(batch.added), _keys(batch.removed)
        node.seq = batch.seq
        bit = node.bit(_LANES[batch.tier])
        self._set(added, bit)
        self._clear(removed, bit)
        return []

    def _set(self, keys: Keys, bit: int) -> None:
        self._sweep(len(keys))
        if len(keys := np.unique(keys)):
            at = self._table.place(keys)
            self._table.put(at, self._sets.move(self._table.get(at), lambda mask: mask | bit))

    def _clear(self, keys: Keys, bit: int) -> None:
        if len(keys := np.unique(keys)):
            at = self._table.find(keys)
            at = at[at >= 0]
            self._table.put(at, self._sets.move(self._table.get(at), lambda mask: mask & ~bit))

    def _sweep(self, num_new: int) -> None:
        """Move some entries off stale sets, faster than new ones can fill the table."""
        if not self._sets.num_stale:
            return
        first = self._swept if self._swept < self._table.num_slots else 0
        count = _SWEEP_SLOTS + 8 * num_new
        numbers = self._table.part(first, count)
        at = self._sets.find_stale(numbers)
        if len(at):
            self._table.put(first + at, self._sets.move(numbers[at], lambda mask: mask))
        self._swept = first + count

    # --- what the scheduler asks ---

    def match(
        self, block_hashes: bytes, tiers: Sequence[Tier] = tuple(Tier)
    ) -> dict[Incarnation, int]:
        """Return, for each node that holds the first block, how long a prefix it holds.

        `block_hashes` are joined. A node's prefix may be spread over several of the `tiers`.
        Raises `ValueError` for hashes of a wrong size.
        """
        keys = _keys(block_hashes)
        lanes = [_LANES[tier] for tier in tiers]
        lengths: dict[Incarnation, int] = {}
        alive = sum(self._by_first)
        for start in range(0, len(keys), _MATCH_BLOCKS):
            some = keys[start : start + _MATCH_BLOCKS]
            alive = self._match_keys(some, start, lanes, alive, lengths)
            if not alive:
                return lengths
        self._note(alive, len(keys), lengths)
        return lengths

    def _match_keys(
        self, keys: Keys, length: int, lanes: list[int], alive: int, lengths: dict[Incarnation, int]
    ) -> int:
        """Go on from `length`; note the nodes that end here and return those that do not."""
        numbers = self._table.look_up(keys)
        # Most blocks have the holders of the one before.
        begins = np.flatnonzero(np.diff(numbers, prepend=-1))
        for begin, number in zip(begins.tolist(), numbers[begins].tolist(), strict=True):
            mask, held = self._sets.masks[number], 0
            for lane in lanes:
                held |= mask >> lane
            if (still := alive & held) != alive:
                self._note(alive ^ still, length + begin, lengths)
                alive = still
                if not alive:
                    break
        return alive

    def _note(self, alive: int, length: int, lengths: dict[Incarnation, int]) -> None:
        while alive and length:
            lowest = alive & -alive
            lengths[self._by_first[lowest].ref.incarnation] = length
            alive ^= lowest

    def longest(
        self, block_hashes: bytes, tiers: Sequence[Tier] = tuple(Tier)
    ) -> tuple[PoolRef, int] | None:
        """Return a node with the longest prefix and its length; of equals, the lowest name."""
        lengths = self.match(block_hashes, tiers)
        refs = {i: self._nodes[i].ref for i in lengths}
        best = min(lengths, key=lambda i: (-lengths[i], refs[i].name, i), default=None)
        return None if best is None else (refs[best], lengths[best])

    def ref(self, incarnation: Incarnation) -> PoolRef | None:
        """Return how to reach a known life of a node."""
        node = self._nodes.get(incarnation)
        return None if node is None else node.ref

    @property
    def num_blocks(self) -> int:
        """Blocks held by at least one node, counted once per tier."""
        lanes = [self._lane(lane) for lane in _LANES.values()]
        sets = zip(self._sets.masks, self._sets.counts, strict=True)
        return sum(n * sum(bool(mask & lane) for lane in lanes) for mask, n in sets if n)

    def _lane(self, lane: int) -> int:
        return sum(node.bit(lane) for node in self._nodes.values())

    def num_replicas(self, block_hash: BlockHash) -> int:
        """Return how many nodes hold a block in some tier."""
        mask = self._sets.masks[self._table.look_up(_keys(block_hash))[0]]
        tiers = sum(1 << lane for lane in _LANES.values())
        return sum(bool(mask & first * tiers) for first in self._by_first)

    def validate(self) -> None:
        """Derive every redundant count and index afresh. Raises `InvariantError`."""
        self._table.validate()
        self._sets.validate(self._table.entries()[1])
        if {n.first: n for n in self._nodes.values()} != self._by_first:
            raise InvariantError("two nodes share a bit")
        known = sum(node.bits for node in self._nodes.values())
        idle = sum(n.bit(_INCOMING) for n in self._nodes.values() if n.part_tier is None)
        if any(mask & ~(known & ~idle) for mask in self._sets.masks):
            raise InvariantError("a set has a holder that is not known")


def _keys(block_hashes: bytes) -> Keys:
    """Return 64 bits of each of the joined hashes. Raises `ValueError`."""
    if len(block_hashes) % BLOCK_HASH_BYTES:
        raise ValueError(
            f"block hashes take {BLOCK_HASH_BYTES} bytes each; got {len(block_hashes)} bytes"
        )
    words = np.frombuffer(block_hashes, "<u8")[:: BLOCK_HASH_BYTES // 8]
    keys: Keys = np.maximum(words, 1, dtype=np.uint64)  # the table knows no key 0
    return keys
