"""Messages that a pool node receives (from workers, other nodes, the Conductor), and replies.

A *transfer* is one worker's claim on blocks for one attempt: its leases, its reservations, its
private blocks. It is named by the connection's peer and the attempt; closing it, or losing the
connection, gives everything back (through quarantine where somebody may still write).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.errors import WireError
from core.ids import AttemptId, Incarnation, PoolRef, SlotHandle
from core.wire import MessageSet


class Tier(StrEnum):
    """Where a replica lies."""

    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class LeaseBlocks:
    """Request: lease the longest committed prefix of `block_hashes` under this transfer.

    Answered by `BlocksLeased`. The lease ends with the transfer, at `ReleaseBlocks`, or after
    `ttl_s` without renewal.
    """

    attempt: AttemptId
    block_hashes: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A committed block, held in place. `checksum` is xxh3-64 over its slice checksums."""

    handle: SlotHandle
    checksum: int


@dataclass(frozen=True, slots=True)
class BlocksLeased:
    """Reply: the first of the asked hashes, in order; `blocks` tells where they are.

    Packed, for a prompt has hundreds, all little-endian: `slots` holds a u32 each, counting over
    the segments of `slots_per_segment` slots, `generations` and `checksums` a u64 each.
    `incarnation` is the pool node's life.
    """

    incarnation: Incarnation
    slots_per_segment: int
    slots: bytes
    generations: bytes
    checksums: bytes

    @classmethod
    def pack(
        cls,
        incarnation: Incarnation,
        slots_per_segment: int,
        slots: Sequence[int],
        generations: Sequence[int],
        checksums: Sequence[int],
    ) -> BlocksLeased:
        """Make the reply from slot, generation and checksum of each block."""
        num_blocks = len(slots)
        return cls(
            incarnation,
            slots_per_segment,
            struct.pack(f"<{num_blocks}I", *slots),
            struct.pack(f"<{num_blocks}Q", *generations),
            struct.pack(f"<{num_blocks}Q", *checksums),
        )

    @property
    def num_blocks(self) -> int:
        """How many are leased. Raises `WireError` when the fields are not of as many."""
        num_blocks, rest = divmod(len(self.slots), 4)
        if rest or not len(self.generations) == len(self.checksums) == 8 * num_blocks:
            raise WireError("BlocksLeased has a slot, a generation and a checksum for each block")
        return num_blocks

    def blocks(self) -> tuple[LeasedBlock, ...]:
        """Unpack. Raises `WireError` as `num_blocks` does, and for segments without slots."""
        num_blocks = self.num_blocks
        if self.slots_per_segment < 1:
            raise WireError(f"a segment of {self.slots_per_segment} slots holds no block")
        slots = struct.unpack(f"<{num_blocks}I", self.slots)
        generations = struct.unpack(f"<{num_blocks}Q", self.generations)
        checksums = struct.unpack(f"<{num_blocks}Q", self.checksums)
        per_segment = self.slots_per_segment
        return tuple(
            LeasedBlock(
                SlotHandle(slot // per_segment, slot % per_segment, self.incarnation, generation),
                checksum,
            )
            for slot, generation, checksum in zip(slots, generations, checksums, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """One way: these leases of the transfer are no longer needed."""

    attempt: AttemptId
    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Request: slots to write `block_hashes` into, and `num_private` private slots.

    Answered by `BlocksReserved`, one outcome per hash and then per private slot. All or nothing
    where memory is short: then every outcome that would need a slot is `SlotsExhausted`.
    A hash that the transfer has a reserved slot for gets that slot again. A slot that nobody began
    to write is lost (`TransferLoss`) after the least of `ttl_s` and the node's `reserve_ttl_s`;
    each lease, reserve or fetch of the transfer renews that.
    """

    attempt: AttemptId
    block_hashes: bytes
    num_private: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class SlotReserved:
    """Write here, then commit."""

    handle: SlotHandle


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """Nothing to write: the block is here and leased to the transfer."""

    block: LeasedBlock


@dataclass(frozen=True, slots=True)
class SlotsExhausted:
    """No slot is free or can be evicted now."""


ReserveOutcome = SlotReserved | AlreadyCommitted | SlotsExhausted


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """Reply to `ReserveBlocks`.

    A hash that another transfer is writing at this moment gets a slot of its own; the copy
    committed second stays private to its transfer and is freed with it.
    """

    outcomes: tuple[ReserveOutcome, ...]


@dataclass(frozen=True, slots=True)
class BeginWrites:
    """Request from a writer before it touches slots of *any* transfer: `WritesBegun`.

    From now on a freed slot stays quarantined until this writer ends its writes or is gone.
    """

    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class WritesBegun:
    """Reply: for each handle, whether it may be written (it is reserved and of this life)."""

    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WriteSlices:
    """One way from a remote writer, after `BeginWrites`: payload is the slices, back to back.

    All of one layer: slice i goes to `handles[i]`. `checksums[i]` is xxh3-64 of the slice.
    Handles that are no longer writable are read and dropped.
    """

    layer: int
    handles: tuple[SlotHandle, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockWritten:
    """All slices of the slot are written; `slice_checksums` are u64 little-endian, by layer."""

    handle: SlotHandle
    slice_checksums: bytes


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """Request from a writer: these blocks are complete. Answered by `BlocksCommitted`.

    The node checks the bytes against the checksums before anybody can see a block. A private
    block becomes readable by its transfer only. The writer's hold on each handle ends.
    """

    blocks: tuple[BlockWritten, ...]


@dataclass(frozen=True, slots=True)
class BlocksCommitted:
    """Reply: whether each block is committed. `False`: stale handle or wrong checksum."""

    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class EndWrites:
    """One way from a writer: it will not touch these slots again (they were not committed)."""

    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Request from a worker: bring these blocks here from `source` and lease them.

    Answered by `BlocksLeased` with the longest prefix that is here afterwards; fewer than asked
    when the source lacks them, is gone, or `deadline_s` passes without progress.
    """

    attempt: AttemptId
    source: PoolRef
    block_hashes: bytes
    ttl_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CloseTransfer:
    """One way: give back everything of this transfer."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Request from another pool node; `BlocksRead` with the blocks as payload, back to back."""

    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """Reply: the longest prefix held here; `slice_checksums` as in `BlockWritten`, per block."""

    slice_checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    """One way from a reader: this committed block failed its checksum; drop it."""

    handle: SlotHandle


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """One way from the Conductor: the directory saw a gap; send a `PoolSnapshot`."""


@dataclass(frozen=True, slots=True)
class GetPoolStats:
    """Request for tools: `PoolStats`."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Reply: slots by state (they sum to `num_slots`) and counters since start."""

    num_slots: int
    slot_bytes: int
    num_free: int
    num_reserved: int
    num_committed: int
    num_evicting: int
    num_quarantined: int
    num_leases: int
    num_transfers: int
    counters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TransferCommits:
    """One way from the node to the transfer's owner: these reserved blocks are readable now."""

    attempt: AttemptId
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class TransferLoss:
    """One way from the node to the transfer's owner: these reserved blocks will not come.

    Their writer is gone or sent wrong bytes; the slots are no longer the transfer's.
    """

    attempt: AttemptId
    handles: tuple[SlotHandle, ...]


MESSAGES = MessageSet(
    LeaseBlocks,
    ReleaseBlocks,
    ReserveBlocks,
    BeginWrites,
    WriteSlices,
    CommitBlocks,
    EndWrites,
    FetchBlocks,
    CloseTransfer,
    ReadBlocks,
    ReportCorrupt,
    SendSnapshot,
    GetPoolStats,
)
"""What a pool node may be sent."""

REPLIES = MessageSet(
    BlocksLeased,
    BlocksReserved,
    WritesBegun,
    BlocksCommitted,
    BlocksRead,
    PoolStats,
    TransferCommits,
    TransferLoss,
)
"""What a pool node sends to workers and other nodes."""
