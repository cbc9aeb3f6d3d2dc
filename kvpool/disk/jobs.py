"""What `DiskState` asks of the disk, and what can come of it. Closed classes.

Jobs that change files (`FileJob`) are done one at a time, in the order in which they came.
`ReadJob`s are done by anybody at any time, beside all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import BlockHash
from kvpool.disk.records import RecordId

# --- outcomes ---


@dataclass(frozen=True, slots=True)
class Stored:
    """The record is with the kernel; a power cut may still lose it, and a read would see that."""


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """The block is in the store, or on its way into it."""


@dataclass(frozen=True, slots=True)
class NoSpace:
    """Neither the size bound nor the disk leaves room for it now."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The operating system refused with this `errno`."""

    errno: int


@dataclass(frozen=True, slots=True)
class Read:
    """The block's bytes are in the target and match their checksums (packed u64, by layer)."""

    slice_checksums: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """The block is not there. The target may hold anything."""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The block is there and damaged. The target may hold anything."""


@dataclass(frozen=True, slots=True)
class Done:
    """The files are as the job says."""


WriteOutcome = Stored | NoSpace | Failed
StoreOutcome = Stored | AlreadyThere | NoSpace | Failed
ReadOutcome = Read | Missing | Corrupt | Failed
FileOutcome = Stored | NoSpace | Failed | Missing | Done

# --- jobs ---


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be stored. `slice_checksums` are packed u64, by layer, as the pool keeps them."""

    key: BlockHash
    namespace: bytes
    slice_checksums: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies: the `index`-th of extent file number `extent`."""

    extent: int
    index: int


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """One record to write; its payload is the `item`-th of the batch."""

    item: int
    place: Place
    record: RecordId
    slice_checksums: bytes


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """One record to read into the `item`-th target of the batch."""

    item: int
    place: Place
    key: BlockHash
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Move:
    """One record to copy as it is."""

    source: Place
    target: Place
    key: BlockHash


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Write records, which follow one another in one extent. One `WriteOutcome` for each."""

    blocks: tuple[PlacedBlock, ...]


@dataclass(frozen=True, slots=True)
class MoveJob:
    """Copy records out of an extent that will go. One `WriteOutcome` or `Missing` for each."""

    extent: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class SealJob:
    """Write the footer of an extent that gets no more records. One outcome."""

    extent: int
    records: tuple[RecordId | None, ...]


@dataclass(frozen=True, slots=True)
class EraseJob:
    """Overwrite records with zeros: `whole` ones, lastingly, or just their headers. One outcome.

    `num_sealed` is the number of records of a sealed extent: its footer is overwritten first.
    """

    extent: int
    indexes: tuple[int, ...]
    whole: bool
    num_sealed: int | None


@dataclass(frozen=True, slots=True)
class DropJob:
    """Remove an extent file, lastingly. One outcome; a file that is not there is removed."""

    extent: int


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Read and verify records. One `ReadOutcome` for each."""

    blocks: tuple[WantedBlock, ...]


FileJob = StoreJob | MoveJob | SealJob | EraseJob | DropJob


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """An extent file as a scan found it. `None` is a dead record, which may hold anything."""

    number: int
    num_bytes: int
    records: tuple[RecordId | None, ...]
    is_sealed: bool


# --- plans ---


@dataclass(frozen=True, slots=True)
class PlannedStore:
    """`outcomes[i]` is `None` where the i-th block's outcome comes with its `StoreJob`."""

    outcomes: tuple[StoreOutcome | None, ...]
    jobs: tuple[FileJob, ...]


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """`outcomes[i]` is `None` where the i-th block's outcome comes with the job."""

    outcomes: tuple[Missing | None, ...]
    job: ReadJob | None


@dataclass(slots=True)
class DiskCounters:
    """Counts since start."""

    num_stored: int = 0
    num_moved: int = 0
    num_evicted: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_corrupt: int = 0
    num_failed_writes: int = 0
    num_failed_reads: int = 0
