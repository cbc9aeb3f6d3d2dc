"""Fetching blocks from another node: the pure machine of one `FetchBlocks` request.

Life of a fetch, batch by batch, until everything is here or something is not to be had:

1. lease the batch at the source, so that it stays there        (`LeaseAtSource`)
2. reserve slots here, with the node itself as their writer
3. read the bytes straight into the slots                        (`ReadFromSource`)
4. verify and commit them like anybody's                         (`VerifyBlocks`)

In the end the transfer gets a lease on the longest prefix that is here. A transfer that closes
meanwhile gets nothing; its slots wait in quarantine for step 3 or 4 to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.ids import AttemptId, BlockHash, PoolRef, SlotHandle
from core.messages.to_pool import BlockWritten, SlotReserved
from kvpool.checksum import CHECKSUM_BYTES
from kvpool.events import Action, CloseAtSource, LeaseAtSource, ReadFromSource, Reply
from kvpool.records import SELF, TransferKey
from kvpool.slots import SlotTable

BATCH_BYTES = 4 << 20
"""Read at a time: a deadline applies to each batch, so a slow link needs small ones."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What was asked, by whom, and under which name the source knows this fetch."""

    fetch: int
    key: TransferKey
    correlation: int
    source: PoolRef
    source_attempt: AttemptId
    block_hashes: tuple[BlockHash, ...]
    ttl_s: float
    deadline_s: float


class Fetch:
    """One fetch. Each method takes an outcome and returns the next actions."""

    def __init__(self, plan: FetchPlan, table: SlotTable) -> None:
        self.plan = plan
        self.cancelled = False
        self.over = False
        self.num_fetched = 0
        self._table = table
        self._asked: tuple[BlockHash, ...] = ()
        self._handles: tuple[SlotHandle, ...] = ()
        self._is_last = False

    def start(self, now_s: float) -> list[Action]:
        """Keep what is here already, and begin."""
        plan = self.plan
        for block_hash in plan.block_hashes:
            self._table.lease(plan.key, (block_hash,), plan.ttl_s, now_s)
        return self.next_batch(now_s)

    def next_batch(self, now_s: float) -> list[Action]:
        """Lease the next missing blocks at the source, or end."""
        size = max(1, BATCH_BYTES // self._table.layout.slot_bytes)
        missing = [h for h in self.plan.block_hashes if not self._table.has(h)]
        self._asked = tuple(missing[:size])
        if not self._asked or self._is_last or self.cancelled:
            return self._end(now_s)
        plan = self.plan
        # Twice the deadline: the lease must outlive the read that follows it.
        lease_s = 2 * plan.deadline_s
        return [
            LeaseAtSource(
                plan.fetch, plan.source, plan.source_attempt, self._asked, lease_s, plan.deadline_s
            )
        ]

    def leased(self, num_blocks: int, now_s: float) -> list[Action]:
        """Reserve slots for what the source has, and read it."""
        self._is_last = num_blocks < len(self._asked)
        if not num_blocks or self.cancelled:
            return self._end(now_s)
        batch = self._asked[:num_blocks]
        plan = self.plan
        outcomes = self._table.reserve(plan.key, batch, 0, plan.ttl_s, now_s)
        wanted = [
            (h, o.handle)
            for h, o in zip(batch, outcomes, strict=True)
            if isinstance(o, SlotReserved)
        ]
        begun = self._table.begin(SELF, [handle for _, handle in wanted])
        wanted = [pair for pair, ok in zip(wanted, begun, strict=True) if ok]
        if not wanted:  # no room here, or others are bringing these very blocks
            return self._end(now_s)
        self._handles = tuple(handle for _, handle in wanted)
        hashes = tuple(h for h, _ in wanted)
        return [ReadFromSource(plan.fetch, plan.source, hashes, self._handles, plan.deadline_s)]

    def read(self, slice_checksums: Sequence[bytes]) -> list[BlockWritten]:
        """Return the blocks to verify; none when the transfer is gone or the reply is wrong."""
        size = CHECKSUM_BYTES * self._table.layout.num_layers
        if [len(c) for c in slice_checksums] != [size] * len(self._handles):
            self._table.abandon(self._handles)
            return []
        blocks = [BlockWritten(h, c) for h, c in zip(self._handles, slice_checksums, strict=True)]
        accepted = self._table.begin_verify(SELF, blocks)
        return [b for b, ok in zip(blocks, accepted, strict=True) if ok]

    def verified(
        self, blocks: Sequence[BlockWritten], good: Sequence[bool], now_s: float
    ) -> list[Action]:
        """Commit a batch and go on, or end when bytes were wrong."""
        for block, is_good in zip(blocks, good, strict=True):
            if self._table.finish_verify(block, is_good, now_s, fetched=True):
                self.num_fetched += 1
        return self.next_batch(now_s) if all(good) else self._end(now_s)

    def failed(self, now_s: float) -> list[Action]:
        """Give the slots back and end with what is here."""
        self._table.abandon(self._handles)
        return self._end(now_s)

    def _end(self, now_s: float) -> list[Action]:
        self.over = True
        plan = self.plan
        leased = (
            self._table.pack(())
            if self.cancelled
            else self._table.lease(plan.key, plan.block_hashes, plan.ttl_s, now_s)
        )
        return [
            CloseAtSource(plan.source, plan.source_attempt),
            Reply(plan.key.link, plan.correlation, leased),
        ]
