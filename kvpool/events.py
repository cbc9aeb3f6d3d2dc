"""What happens to a pool node, and what it decides to do: the closed sets of its state machine.

Events are in the past tense and actions in the imperative. `correlation` pairs a request with its
answer; the other numbers are made by the state machine and come back with the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import AttemptId, BlockHash, PoolRef, SlotHandle
from core.messages.to_pool import BlocksRead, BlockWritten
from core.wire import Message
from kvpool.records import LinkId


@dataclass(frozen=True, slots=True)
class Requested:
    """A peer sent a request; exactly one `Reply`, `Refuse` or `SendBlocks` answers it."""

    now_s: float
    link: LinkId
    correlation: int
    message: Message


@dataclass(frozen=True, slots=True)
class Told:
    """A peer, or the Conductor, sent a one-way message."""

    now_s: float
    link: LinkId
    message: Message


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The connection is gone."""

    now_s: float
    link: LinkId


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed (every `event_interval_s`)."""

    now_s: float


@dataclass(frozen=True, slots=True)
class ConductorRegistered:
    """A Conductor knows this node from now on, and nothing of its blocks."""


@dataclass(frozen=True, slots=True)
class BlocksVerified:
    """Outcome of `VerifyBlocks`: whether each block's bytes have their checksums."""

    now_s: float
    verification: int
    good: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BlocksSent:
    """Outcome of `SendBlocks`: the bytes are with the kernel, or the peer is gone."""

    read: int


@dataclass(frozen=True, slots=True)
class SourceLeased:
    """Outcome of `LeaseAtSource`: the first `num_blocks` are there and stay there."""

    now_s: float
    fetch: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SourceRead:
    """Outcome of `ReadFromSource`: the bytes are in the slots, nobody writes there any more."""

    now_s: float
    fetch: int
    slice_checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """Outcome of either: refused, gone or too slow; nobody writes to the slots any more."""

    now_s: float
    fetch: int
    reason: str


Event = (
    Requested
    | Told
    | LinkClosed
    | Ticked
    | ConductorRegistered
    | BlocksVerified
    | BlocksSent
    | SourceLeased
    | SourceRead
    | SourceFailed
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request."""

    link: LinkId
    correlation: int
    message: Message


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error."""

    link: LinkId
    correlation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Answer a request with `message` and the bytes of `slots`; then `BlocksSent`."""

    link: LinkId
    correlation: int
    read: int
    message: BlocksRead
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a one-way message to a peer, if it is still there."""

    link: LinkId
    message: Message


@dataclass(frozen=True, slots=True)
class TellConductor:
    """Send a one-way message to the Conductor, if there is one."""

    message: Message


@dataclass(frozen=True, slots=True)
class VerifyBlocks:
    """Compare the bytes in the slots with the checksums; then `BlocksVerified`."""

    verification: int
    blocks: tuple[BlockWritten, ...]


@dataclass(frozen=True, slots=True)
class LeaseAtSource:
    """Ask `source` to lease a prefix of `block_hashes`; then `SourceLeased` or `SourceFailed`."""

    fetch: int
    source: PoolRef
    attempt: AttemptId
    block_hashes: tuple[BlockHash, ...]
    ttl_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ReadFromSource:
    """Read leased blocks into `handles`; then `SourceRead` or `SourceFailed`."""

    fetch: int
    source: PoolRef
    block_hashes: tuple[BlockHash, ...]
    handles: tuple[SlotHandle, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CloseAtSource:
    """Give the leases at `source` back, if it is still there."""

    source: PoolRef
    attempt: AttemptId


Action = (
    Reply
    | Refuse
    | SendBlocks
    | Tell
    | TellConductor
    | VerifyBlocks
    | LeaseAtSource
    | ReadFromSource
    | CloseAtSource
)
