"""What can happen to a decode worker, and what its state machine may order.

Events are named in the past tense, actions in the imperative. The shell answers every action that
has an outcome with exactly one event, also when the attempt has ended meanwhile: only then is it
certain that nobody touches the attempt's blocks and slots any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import AttemptId, BlockHash, Incarnation, PoolRef, SlotHandle, WorkerRef
from core.messages.to_decode import DecodeRequest, PrefillFinished
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.messages.to_pool import LeasedBlock, ReserveOutcome
from core.messages.to_prefill import SlotForBlock
from engine.base import SequenceResult, SequenceStep

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolConnected:
    """This host's pool node answers, in the life named by `ref`."""

    ref: PoolRef


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The connection to this host's pool node ended: every transfer in it is gone."""


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A gateway sent a request."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The gateway is done with this attempt and older ones of the request."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The connection from this gateway ended."""

    gateway: Incarnation


@dataclass(frozen=True, slots=True)
class FirstTokenReceived:
    """The prefill worker `sender` sampled the first token; may precede the request."""

    sender: Incarnation
    message: PrefillFinished


@dataclass(frozen=True, slots=True)
class PrefillGone:
    """The prefill worker `sender` has no such attempt (any more)."""

    sender: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The connection to `sender`, a life of a prefill worker, ended or could not be made."""

    sender: Incarnation


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """Outcome of `ReserveSlots`: `outcomes[i]` is that of block number `indices[i]`."""

    attempt: AttemptId
    indices: tuple[int, ...]
    outcomes: tuple[ReserveOutcome, ...]


@dataclass(frozen=True, slots=True)
class ReserveFailed:
    """Outcome of `ReserveSlots`: the pool node did not answer."""

    attempt: AttemptId
    detail: str


@dataclass(frozen=True, slots=True)
class PrefixFetched:
    """Outcome of `FetchPrefix`: of `num_asked` blocks from number `first` on, these are here."""

    attempt: AttemptId
    first: int
    num_asked: int
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class CommitsReceived:
    """Reserved blocks of the attempt are complete and readable."""

    attempt: AttemptId
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class LossReceived:
    """Reserved slots of the attempt are taken back: their writer is gone or wrote nonsense."""

    attempt: AttemptId
    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class BlocksLoaded:
    """Outcome of `LoadBlocks`: all are in the paged cache and checked there."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class BlockCorrupt:
    """Outcome of `LoadBlocks`: after `num_good` blocks came one with a wrong checksum."""

    attempt: AttemptId
    num_good: int
    handle: SlotHandle


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Outcome of `LoadBlocks`: after `num_good` blocks the pool node or a lease was gone."""

    attempt: AttemptId
    num_good: int
    detail: str


@dataclass(frozen=True, slots=True)
class StepComputed:
    """Outcome of `RunStep`, one result per sequence in its order."""

    results: tuple[SequenceResult, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Outcome of `RunStep`: the engine raised."""

    detail: str


@dataclass(frozen=True, slots=True)
class StepAbandoned:
    """Outcome of `RunStep`: it ended early, as `AbandonStep` asked for."""


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """Outcome of `PublishBlocks`: `num_committed` of them are in the pool now."""

    publish_id: int
    num_committed: int


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Take no new requests; what is here is finished."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the deadlines; comes a few times a second."""


Event = (
    PoolConnected
    | PoolLost
    | RequestReceived
    | Cancelled
    | GatewayLost
    | FirstTokenReceived
    | PrefillGone
    | PrefillLost
    | SlotsReserved
    | ReserveFailed
    | PrefixFetched
    | CommitsReceived
    | LossReceived
    | BlocksLoaded
    | BlockCorrupt
    | LoadFailed
    | StepComputed
    | EngineFailed
    | StepAbandoned
    | PublishEnded
    | DrainStarted
    | TimePassed
)

# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReserveSlots:
    """Reserve slots for the blocks `indices`: one per hash, then `num_private` (0 or 1)."""

    attempt: AttemptId
    indices: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    num_private: int


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Lease these blocks here, after bringing them from `source` unless that is `None`."""

    attempt: AttemptId
    source: PoolRef | None
    first: int
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class SendDecodeSlots:
    """Tell the prefill worker where to write; without slots it says that we listen."""

    attempt: AttemptId
    prefill: WorkerRef
    slots: tuple[SlotForBlock, ...]


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Tell the prefill worker that all is here."""

    attempt: AttemptId
    prefill: WorkerRef


@dataclass(frozen=True, slots=True)
class BlockToLoad:
    """Copy this committed block of the pool into paged block `block_id`."""

    leased: LeasedBlock
    block_id: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy and check blocks, in order, beside the running step."""

    attempt: AttemptId
    blocks: tuple[BlockToLoad, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one engine step."""

    sequences: tuple[SequenceStep, ...]


@dataclass(frozen=True, slots=True)
class AbandonStep:
    """End the step under way after its present layer, unless it is done before."""


@dataclass(frozen=True, slots=True)
class SendTokens:
    """Send one frame to one gateway."""

    gateway: Incarnation
    tokens: tuple[TokenEmitted, ...]


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Give the attempt back to its gateway."""

    attempt: AttemptId
    code: FailureCode
    detail: str


@dataclass(frozen=True, slots=True)
class BlockToPublish:
    """Paged block `block_id` holds `block_hash`, complete, and stays so until the outcome."""

    block_hash: BlockHash
    block_id: int


@dataclass(frozen=True, slots=True)
class PublishBlocks:
    """Copy blocks into the pool under a transfer of their own."""

    publish_id: int
    blocks: tuple[BlockToPublish, ...]


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    """Tell the pool node that a committed block is wrong."""

    handle: SlotHandle


@dataclass(frozen=True, slots=True)
class CloseTransfer:
    """Give back all slots and leases of the attempt."""

    attempt: AttemptId


Action = (
    ReserveSlots
    | FetchPrefix
    | SendDecodeSlots
    | SendRelease
    | LoadBlocks
    | RunStep
    | AbandonStep
    | SendTokens
    | SendFailure
    | PublishBlocks
    | ReportCorrupt
    | CloseTransfer
)
