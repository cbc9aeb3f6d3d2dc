"""What the slot table keeps: one record per slot and per transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol

from core.ids import AttemptId, BlockHash

LinkId = NewType("LinkId", int)
"""One connection to this node, numbered by the shell."""

SELF = LinkId(0)
"""The node itself, as the writer of blocks it fetches."""


class Generations(Protocol):
    """A table of u64, one for each slot: a list, or shared memory."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, generation: int, /) -> None: ...


class SlotState(StrEnum):
    """See `kvpool/slots.py`."""

    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    EVICTING = "evicting"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class TransferKey:
    """Names a transfer: the connection it came by and the attempt."""

    link: LinkId
    attempt: AttemptId


@dataclass(slots=True)
class Slot:
    """One slot. `owner` is the transfer that alone knows it; public blocks have none.

    `num_holders` counts leases and reads of a public block. `writer` is whoever may write now.
    """

    state: SlotState = SlotState.FREE
    block_hash: BlockHash | None = None
    owner: TransferKey | None = None
    writer: LinkId | None = None
    verifying: bool = False
    num_holders: int = 0
    slice_checksums: bytes = b""
    checksum: int = 0


@dataclass(slots=True)
class Transfer:
    """What a transfer holds, in the order it came (a prefix's earlier blocks first).

    Its leases and own blocks run out at `expires_s`, reservations nobody writes at
    `reserve_expires_s`; every lease or reserve call of the transfer renews both.
    """

    ttl_s: float
    expires_s: float
    reserve_expires_s: float
    slots: dict[int, None] = field(default_factory=dict)
