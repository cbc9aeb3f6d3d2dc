"""Messages that the Conductor receives, and its replies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.ids import Address, AttemptId, Incarnation, PoolRef, WorkerRef
from core.latency import LatencyProfile
from core.messages.to_pool import Tier
from core.wire import MessageSet


class WorkerRole(StrEnum):
    """What a worker does. A coupled worker does both and needs no transfer."""

    PREFILL = "prefill"
    DECODE = "decode"
    COUPLED = "coupled"


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What a worker can hold; fixed for its life."""

    num_blocks: int
    block_size: int
    max_batch: int
    max_chunk_tokens: int


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    """Request; sent first by a worker, also after the Conductor or the connection came back.

    `attempts` are the attempts it still works on, so that a new Conductor knows the load.
    `profile` holds the worker's own fitted latency model, `None` until it has one.
    """

    role: WorkerRole
    ref: WorkerRef
    capacity: WorkerCapacity
    attempts: tuple[AttemptId, ...]
    profile: LatencyProfile | None


@dataclass(frozen=True, slots=True)
class RegisterPoolNode:
    """Request; sent first by a pool node. It sends a `PoolSnapshot` next."""

    ref: PoolRef
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class RegisterGateway:
    """Request; sent first by a gateway."""

    name: str
    incarnation: Incarnation
    address: Address


@dataclass(frozen=True, slots=True)
class Registered:
    """Reply to each Register message. `epoch` is the Conductor's term; a lower one is refused."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prefill worker has to do: requests and not yet computed tokens of all of them."""

    num_waiting: int
    num_running: int
    queued_tokens: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode worker has to do. `context_tokens` sums over its running batch."""

    num_waiting: int
    num_running: int
    context_tokens: int
    free_blocks: int
    step_s: float


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Bytes moved and seconds taken from a pool node to the reporter, since the last report."""

    source: Incarnation
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Bytes moved and seconds taken between two processes, since the reporter's start.

    Names, not lives: the sums go on when the other side restarts. Transfers at the same time add
    up their seconds.
    """

    source: str
    destination: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One way, at every heartbeat. A coupled worker sends both loads."""

    prefill: PrefillLoad | None
    decode: DecodeLoad | None
    draining: bool
    transfers: tuple[TransferTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """What happened in a pool node since its start.

    `num_corrupted` counts copies whose checksum was found wrong, by a reader or when written.
    """

    num_evicted_blocks: int = 0
    num_fetched_blocks: int = 0
    num_corrupted_blocks: int = 0
    num_expired_leases: int = 0


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One way, at every heartbeat of a pool node."""

    num_free: int
    num_reserved: int
    num_committed: int
    num_quarantined: int
    num_leases: int
    links: tuple[LinkSample, ...]
    num_evicting: int = 0
    totals: PoolTotals = PoolTotals()
    transfers: tuple[TransferTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """One way: what changed in a pool node since the previous batch, in order.

    `seq` counts batches from 1 and is raised by one each; a gap makes the directory ask for a
    snapshot. `added` and `removed` are joined block hashes; a hash is never in both.
    """

    seq: int
    tier: Tier
    added: bytes
    removed: bytes


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One way: everything committed, as of batch `seq`; replaces what was known of the node.

    Split over several messages when large; `last` ends it.
    """

    seq: int
    tier: Tier
    block_hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """Request: where shall this attempt run? Answered by `Placement` or `Rejection`.

    `num_tokens` counts all known tokens (prompt and emitted), `num_new_tokens` how many may still
    come. `block_hashes` are those of the full blocks of the known tokens, joined. `excluded` are
    lives that already failed this request.
    """

    attempt: AttemptId
    num_tokens: int
    num_new_tokens: int
    block_hashes: bytes
    needs_decode: bool
    priority: int
    excluded: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Blocks `first ... first + count - 1` of the request can be read from this pool node."""

    pool: PoolRef
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Reply: the workers and where the reusable prefix is.

    `prefill` is `None` for a coupled worker, which is then `decode`; `decode` is `None` when the
    request needs none. Predictions are for records and admission, not promises.
    """

    epoch: int
    prefill: WorkerRef | None
    decode: WorkerRef | None
    sources: tuple[BlockSource, ...]
    predicted_ttft_s: float
    predicted_tbt_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Rejection:
    """Reply: not now. `overloaded` tells 429 (load) from 503 (no worker can serve it at all)."""

    epoch: int
    reason: str
    overloaded: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """One way from the gateway: the first token of this attempt is here."""

    attempt: AttemptId
    num_computed_tokens: int
    num_cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """One way from the gateway: this attempt uses no worker any more, for whatever reason."""

    attempt: AttemptId
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class GetClusterState:
    """Request for `halfmoon status`; answered by `ClusterState`."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A row of `halfmoon status`. `restarts` counts earlier lives seen under this name.

    `num_blocks` is what fits into its paged cache, or into the slots of a pool node, whose
    `slot_bytes` are those of each; a worker has none.
    """

    role: str
    name: str
    incarnation: Incarnation
    address: Address
    pool: str
    restarts: int
    num_assigned: int
    num_blocks: int
    slot_bytes: int | None
    report: WorkerReport | None
    pool_report: PoolReport | None
    last_seen_s: float


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Reply: what the Conductor knows."""

    epoch: int
    policy: str
    workers: tuple[WorkerState, ...]
    num_indexed_blocks: int
    num_placed: int
    num_rejected: int
    num_directory_gaps: int


MESSAGES = MessageSet(
    RegisterWorker,
    RegisterPoolNode,
    RegisterGateway,
    WorkerReport,
    PoolReport,
    PoolEvents,
    PoolSnapshot,
    PlaceRequest,
    PrefillEnded,
    AttemptEnded,
    GetClusterState,
)
"""What a Conductor may be sent."""

REPLIES = MessageSet(Registered, Placement, Rejection, ClusterState)
"""What a Conductor answers with; pool nodes may also get `to_pool.SendSnapshot`."""
