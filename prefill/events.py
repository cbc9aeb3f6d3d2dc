"""What can happen to a prefill worker's attempts, and what its state machine can ask for.

`prefill.state` says when which comes. The shell answers each action marked *answered* with exactly
one of the named events, whatever happens and within a deadline: until then the attempt's blocks
are not given to anybody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import AttemptId, BlockHash, Incarnation, PoolRef, SlotHandle, WorkerRef
from core.messages.to_conductor import BlockSource
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.messages.to_pool import LeasedBlock, ReserveOutcome
from core.messages.to_prefill import SlotForBlock
from core.requests import SamplingParams
from engine.base import SequenceResult, SequenceStep


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """A `PrefillRequest`, unpacked. `block_hashes` are those of all full blocks."""

    attempt: AttemptId
    token_ids: tuple[int, ...]
    num_output_tokens: int
    block_hashes: tuple[BlockHash, ...]
    num_reusable_blocks: int
    params: SamplingParams
    sources: tuple[BlockSource, ...]
    decode: WorkerRef | None
    priority: int


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A gateway wants this attempt."""

    work: PrefillWork


@dataclass(frozen=True, slots=True)
class DecodeSlotsReceived:
    """A decode worker named slots of its pool node for blocks of the attempt."""

    attempt: AttemptId
    decode: Incarnation
    pool: PoolRef
    slots: tuple[SlotForBlock, ...]


@dataclass(frozen=True, slots=True)
class PrefixLeased:
    """The host's pool node holds these next blocks of the prefix for us."""

    attempt: AttemptId
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class PrefixFetched:
    """The host's pool node got these next blocks from another one and holds them for us."""

    attempt: AttemptId
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class PrefixUnavailable:
    """The lease or fetch failed: no pool node, or no answer in time."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PrefixBlocksLoaded:
    """All leased blocks are in the paged cache, and the copies have the right checksums."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PrefixBlockBroken:
    """Only the first `num_good` of them are: the next was corrupt, or its node died."""

    attempt: AttemptId
    num_good: int


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """The host's pool node answered a `ReserveOwnSlots`, one outcome for each block."""

    attempt: AttemptId
    pool: PoolRef
    outcomes: tuple[ReserveOutcome, ...]


@dataclass(frozen=True, slots=True)
class ReservationFailed:
    """It did not."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class WritesBegun:
    """The pool node accepted, or did not, each handle of a `BeginWrites`."""

    attempt: AttemptId
    pool: Incarnation
    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class SlicesWritten:
    """Everything of a `WriteBlocks` has left our memory."""

    attempt: AttemptId
    pool: Incarnation


@dataclass(frozen=True, slots=True)
class BlocksCommitted:
    """The pool node made the blocks of a `CommitBlocks` readable, or did not."""

    attempt: AttemptId
    pool: Incarnation
    accepted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WritesFailed:
    """The pool node is gone or too slow; our connection to it is closed, no byte will follow."""

    attempt: AttemptId
    pool: Incarnation


@dataclass(frozen=True, slots=True)
class LayerComputed:
    """The running chunk's K and V of this layer are in the paged cache."""

    layer: int


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """The chunk is done; one result for each of its steps, in order."""

    results: tuple[SequenceResult, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The running chunk raised."""

    detail: str


@dataclass(frozen=True, slots=True)
class ChunkAbandoned:
    """The running chunk ended early, as `AbandonChunk` asked for."""


@dataclass(frozen=True, slots=True)
class Released:
    """The decode worker has every block it needs."""

    attempt: AttemptId
    decode: Incarnation


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The gateway wants no more of this attempt, nor of older ones of its request."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The connection of this gateway is gone."""

    gateway: Incarnation


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """The connection of this decode worker is gone."""

    decode: Incarnation


@dataclass(frozen=True, slots=True)
class PoolConnected:
    """This is the host's pool node from now on."""

    pool: PoolRef


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The host has no pool node until the next `PoolConnected`."""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Take no new request; finish what is here."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Time passed: look for deadlines. Comes several times a second."""


Event = (
    RequestReceived
    | DecodeSlotsReceived
    | PrefixLeased
    | PrefixFetched
    | PrefixUnavailable
    | PrefixBlocksLoaded
    | PrefixBlockBroken
    | SlotsReserved
    | ReservationFailed
    | WritesBegun
    | SlicesWritten
    | BlocksCommitted
    | WritesFailed
    | LayerComputed
    | ChunkComputed
    | EngineFailed
    | ChunkAbandoned
    | Released
    | Cancelled
    | GatewayLost
    | DecodeLost
    | PoolConnected
    | PoolLost
    | DrainStarted
    | TimedOut
)


# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeasePrefix:
    """Ask the host's pool node. Answered: `PrefixLeased`, `PrefixUnavailable`."""

    attempt: AttemptId
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Have the host's pool node fetch. Answered: `PrefixFetched`, `PrefixUnavailable`."""

    attempt: AttemptId
    source: PoolRef
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy slots into paged blocks and check the copies; then give the leases back.

    Answered: `PrefixBlocksLoaded`, `PrefixBlockBroken`.
    """

    attempt: AttemptId
    blocks: tuple[LeasedBlock, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ZeroBlock:
    """Clear a paged block that will not be filled to its end."""

    block_id: int


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Start an engine step; `LayerComputed` comes for each layer.

    Answered: `ChunkComputed`, `EngineFailed`, `ChunkAbandoned`.
    """

    steps: tuple[SequenceStep, ...]


@dataclass(frozen=True, slots=True)
class AbandonChunk:
    """End the running chunk after its present layer, unless it is done before."""


@dataclass(frozen=True, slots=True)
class ReserveOwnSlots:
    """Reserve slots to publish in. Answered: `SlotsReserved`, `ReservationFailed`."""

    attempt: AttemptId
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BeginWrites:
    """Say that we are about to write. Answered: `WritesBegun`, `WritesFailed`."""

    attempt: AttemptId
    pool: PoolRef
    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class LayerSlices:
    """One layer of each of these paged blocks goes into the slot at the same place."""

    layer: int
    block_ids: tuple[int, ...]
    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Write slices, in order. Answered: `SlicesWritten`, `WritesFailed`."""

    attempt: AttemptId
    pool: PoolRef
    slices: tuple[LayerSlices, ...]


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """Every layer of these slots is written. Answered: `BlocksCommitted`, `WritesFailed`."""

    attempt: AttemptId
    pool: PoolRef
    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class EndWrites:
    """Tell the pool node that we shall not touch these slots again."""

    pool: PoolRef
    handles: tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class CloseTransfer:
    """Give everything of the attempt back to the host's pool node."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class SendTokens:
    """All tokens of one step that belong to this gateway."""

    gateway: Incarnation
    tokens: tuple[TokenEmitted, ...]


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Tell the gateway in the attempt's name that it was given up."""

    attempt: AttemptId
    code: FailureCode
    detail: str


@dataclass(frozen=True, slots=True)
class SendPrefillFinished:
    """Tell the decode worker its first token, if it is connected; it is told again later if not."""

    decode: Incarnation
    attempt: AttemptId
    token_id: int
    finished: bool


@dataclass(frozen=True, slots=True)
class SendPrefillGone:
    """Tell the decode worker, if it is connected, that no block will come."""

    decode: Incarnation
    attempt: AttemptId


PoolAction = (
    LeasePrefix
    | FetchPrefix
    | LoadBlocks
    | ReserveOwnSlots
    | BeginWrites
    | WriteBlocks
    | CommitBlocks
)
"""Those that wait for a pool node; each is answered by one event."""

Action = (
    PoolAction
    | ZeroBlock
    | RunChunk
    | AbandonChunk
    | EndWrites
    | CloseTransfer
    | SendTokens
    | SendFailure
    | SendPrefillFinished
    | SendPrefillGone
)
