"""What the Conductor is told and what it wants done. Closed sets; the event log writes both.

Every event carries its time on the shell's monotonic clock. Requests carry a `correlation` that
comes back with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import Incarnation
from core.messages.to_conductor import (
    AttemptEnded,
    Placement,
    PlaceRequest,
    PoolEvents,
    PoolReport,
    PoolSnapshot,
    PrefillEnded,
    Registered,
    RegisterGateway,
    RegisterPoolNode,
    RegisterWorker,
    Rejection,
    WorkerReport,
)


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker asks to be known, also after the Conductor or the connection came back."""

    now_s: float
    correlation: int
    message: RegisterWorker


@dataclass(frozen=True, slots=True)
class PoolNodeRegistered:
    """A pool node asks to be known."""

    now_s: float
    correlation: int
    message: RegisterPoolNode


@dataclass(frozen=True, slots=True)
class GatewayRegistered:
    """A gateway asks to be known."""

    now_s: float
    correlation: int
    message: RegisterGateway


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A worker's heartbeat."""

    now_s: float
    incarnation: Incarnation
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class PoolReported:
    """A pool node's heartbeat."""

    now_s: float
    incarnation: Incarnation
    report: PoolReport


@dataclass(frozen=True, slots=True)
class PoolEventsReceived:
    """What changed in a pool node."""

    now_s: float
    incarnation: Incarnation
    batch: PoolEvents


@dataclass(frozen=True, slots=True)
class PoolSnapshotReceived:
    """A part of what a pool node holds."""

    now_s: float
    incarnation: Incarnation
    part: PoolSnapshot


@dataclass(frozen=True, slots=True)
class PlacementRequested:
    """A gateway asks where an attempt shall run."""

    now_s: float
    correlation: int
    request: PlaceRequest


@dataclass(frozen=True, slots=True)
class PrefillReported:
    """A gateway got the first token of an attempt."""

    now_s: float
    ended: PrefillEnded


@dataclass(frozen=True, slots=True)
class AttemptReported:
    """A gateway says that an attempt uses no worker any more."""

    now_s: float
    ended: AttemptEnded


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to this life of a worker, pool node or gateway is gone."""

    now_s: float
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time went on."""

    now_s: float


EVENTS = (
    WorkerRegistered,
    PoolNodeRegistered,
    GatewayRegistered,
    WorkerReported,
    PoolReported,
    PoolEventsReceived,
    PoolSnapshotReceived,
    PlacementRequested,
    PrefillReported,
    AttemptReported,
    PeerLost,
    Ticked,
)

Event = (
    WorkerRegistered
    | PoolNodeRegistered
    | GatewayRegistered
    | WorkerReported
    | PoolReported
    | PoolEventsReceived
    | PoolSnapshotReceived
    | PlacementRequested
    | PrefillReported
    | AttemptReported
    | PeerLost
    | Ticked
)


@dataclass(frozen=True, slots=True)
class Admit:
    """Answer a registration."""

    correlation: int
    registered: Registered


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a registration with an error: a newer life has taken this name."""

    correlation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """Answer a placement request."""

    correlation: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer a placement request: not now."""

    correlation: int
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask this pool node for everything it holds: the directory saw a gap."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection of this life, if there is one: it is replaced or silent."""

    incarnation: Incarnation
    reason: str


ACTIONS = (Admit, Refuse, Place, Reject, RequestSnapshot, Disconnect)

Action = Admit | Refuse | Place | Reject | RequestSnapshot | Disconnect
