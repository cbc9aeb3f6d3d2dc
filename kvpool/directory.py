"""The directory: which pool node holds which block. Pure; it runs inside the Conductor.

It is soft state, built from what the nodes publish: a wrong entry costs a recomputation, never a
wrong answer. Life of a node's entries:

1. `add` when the node registers; it sends a snapshot next.
2. `apply` each snapshot part (swapped in when the last one came) and each batch of changes.
3. A batch that is not the next one is a gap: `apply` returns `AskSnapshot`, and the node's
   batches are passed over until the snapshot is there.
4. `drop` when that life of the node is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.errors import InvariantError
from core.hashing import split_hashes
from core.ids import BlockHash, Incarnation, PoolRef
from core.messages.to_conductor import PoolEvents, PoolSnapshot
from core.messages.to_pool import Tier


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Send `SendSnapshot` to this node."""

    node: Incarnation


@dataclass(slots=True)
class _Node:
    """A node's entries. `bit` is its place in the masks; `seq` the last batch applied."""

    ref: PoolRef
    bit: int
    seq: int = 0
    in_sync: bool = False
    held: dict[Tier, set[BlockHash]] = field(default_factory=lambda: {t: set() for t in Tier})
    part_seq: int = 0
    part_tier: Tier | None = None
    part: set[BlockHash] = field(default_factory=set)


class Directory:
    """See the module's docstring. Costs 1 dict entry per block and tier, 1 bit mask of nodes."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self._nodes: dict[Incarnation, _Node] = {}
        self._by_bit: dict[int, _Node] = {}
        self._masks: dict[Tier, dict[BlockHash, int]] = {t: {} for t in Tier}

    # --- what the nodes tell ---

    def add(self, ref: PoolRef) -> None:
        """Know a life of a node. Registering again keeps its entries until the new snapshot."""
        if (known := self._nodes.get(ref.incarnation)) is not None:
            known.ref = ref
            known.in_sync = False
            known.part_tier = None
            return
        bit = next(b for b in range(len(self._by_bit) + 1) if b not in self._by_bit)
        node = _Node(ref, bit)
        self._nodes[ref.incarnation] = self._by_bit[bit] = node

    def drop(self, incarnation: Incarnation) -> None:
        """Forget a life of a node; an unknown one is passed over."""
        node = self._nodes.pop(incarnation, None)
        if node is None:
            return
        for tier, held in node.held.items():
            self._clear(node, tier, held)
        del self._by_bit[node.bit]

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
        if (node.part_tier, node.part_seq) != (part.tier, part.seq):
            node.part_tier, node.part_seq, node.part = part.tier, part.seq, set()
        node.part.update(split_hashes(part.block_hashes))
        if not part.last:
            return
        held = node.held[part.tier]
        self._clear(node, part.tier, held - node.part)
        self._set(node, part.tier, node.part - held)
        node.held[part.tier] = node.part
        node.part_tier, node.part = None, set()
        node.seq, node.in_sync = part.seq, True

    def _take_batch(self, node: _Node, batch: PoolEvents) -> list[AskSnapshot]:
        if not node.in_sync or batch.seq <= node.seq:
            return []
        if batch.seq != node.seq + 1 or node.part_tier is not None:
            self.num_gaps += 1
            node.in_sync = False
            node.part_tier = None
            return [AskSnapshot(node.ref.incarnation)]
        held = node.held[batch.tier]
        added = set(split_hashes(batch.added)) - held
        removed = held.intersection(split_hashes(batch.removed))
        node.seq = batch.seq
        self._set(node, batch.tier, added)
        self._clear(node, batch.tier, removed)
        held |= added
        held -= removed
        return []

    def _set(self, node: _Node, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        masks, bit = self._masks[tier], 1 << node.bit
        for block_hash in hashes:
            masks[block_hash] = masks.get(block_hash, 0) | bit

    def _clear(self, node: _Node, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        masks, bit = self._masks[tier], 1 << node.bit
        for block_hash in hashes:
            rest = masks[block_hash] & ~bit
            if rest:
                masks[block_hash] = rest
            else:
                del masks[block_hash]

    # --- what the scheduler asks ---

    def match(
        self, block_hashes: Sequence[BlockHash], tiers: Sequence[Tier] = tuple(Tier)
    ) -> dict[Incarnation, int]:
        """Return, for each node that holds the first block, how long a prefix it holds.

        A node's prefix may be spread over several of the `tiers`.
        """
        tables = [self._masks[t] for t in tiers if self._masks[t]]
        lengths: dict[Incarnation, int] = {}
        alive = (1 << (max(self._by_bit, default=-1) + 1)) - 1
        length = 0
        for block_hash in block_hashes:
            mask = 0
            for table in tables:
                mask |= table.get(block_hash, 0)
            if lost := alive & ~mask:
                self._note(lost, length, lengths)
                alive &= mask
                if not alive:
                    break
            length += 1
        self._note(alive, length, lengths)
        return lengths

    def _note(self, mask: int, length: int, lengths: dict[Incarnation, int]) -> None:
        while mask and length:
            lowest = mask & -mask
            lengths[self._by_bit[lowest.bit_length() - 1].ref.incarnation] = length
            mask ^= lowest

    def longest(
        self, block_hashes: Sequence[BlockHash], tiers: Sequence[Tier] = tuple(Tier)
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
        return sum(len(masks) for masks in self._masks.values())

    def num_replicas(self, block_hash: BlockHash) -> int:
        """Return how many nodes hold a block in some tier."""
        mask = 0
        for masks in self._masks.values():
            mask |= masks.get(block_hash, 0)
        return mask.bit_count()

    def validate(self) -> None:
        """Derive the masks afresh from the nodes' entries. Raises `InvariantError`."""
        masks: dict[Tier, dict[BlockHash, int]] = {t: {} for t in Tier}
        for node in self._nodes.values():
            for tier, held in node.held.items():
                for block_hash in held:
                    masks[tier][block_hash] = masks[tier].get(block_hash, 0) | 1 << node.bit
        if masks != self._masks:
            raise InvariantError("the masks and the nodes' entries differ")
        if {n.bit: n for n in self._nodes.values()} != self._by_bit:
            raise InvariantError("two nodes share a bit")
