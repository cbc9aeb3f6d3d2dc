"""What happens to a request and what is to be done about it: the words of `cluster.requests`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from core.ids import AttemptId, BlockHash, Incarnation, RequestId, WorkerRef
from core.messages.to_conductor import (
    AttemptEnded,
    Placement,
    PlaceRequest,
    PrefillEnded,
    Rejection,
)
from core.messages.to_decode import CancelDecode, DecodeRequest
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.messages.to_prefill import CancelPrefill, PrefillRequest
from core.requests import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is safe to show, and whether a stop string ended the output with it."""

    text: str
    stopped: bool


class OutputText(Protocol):
    """Turns output tokens into text and looks for stop strings; owned by one request."""

    def push(self, token_id: int, *, ends_generation: bool) -> TextDelta:
        """Take the next token. `ends_generation` marks a stop token, which shows no text."""
        ...

    def finish(self) -> TextDelta:
        """Release what was held back. Nothing may be pushed afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What never changes during a request.

    `block_hashes` are those of the full blocks of the prompt, under `root`. `reuse` is off when
    prompt logprobs are wanted: they need every prompt position computed.
    """

    request: RequestId
    prompt_token_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    root: BlockHash
    block_size: int
    params: SamplingParams
    priority: int = 0
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """When a request is given up.

    All count since its last new token: `max_failures` failed attempts, `window_s` seconds since
    the first failure. An attempt that gives no token for `stall_s` has failed.
    """

    max_failures: int
    window_s: float
    stall_s: float


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request begins."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Placed:
    """The Conductor answered."""

    now_s: float
    attempt: AttemptId
    placement: Placement


@dataclass(frozen=True, slots=True)
class Rejected:
    """The Conductor refused."""

    now_s: float
    attempt: AttemptId
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class ConductorLost:
    """No answer came in time. The Conductor may or may not have placed the attempt."""

    now_s: float
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last `SetTimer` has come. A stale one changes nothing."""

    now_s: float


@dataclass(frozen=True, slots=True)
class TokenReceived:
    """A worker sent a token."""

    now_s: float
    token: TokenEmitted


@dataclass(frozen=True, slots=True)
class AttemptGivenBack:
    """A worker let go of the attempt (`to_gateway.AttemptFailed`)."""

    now_s: float
    attempt: AttemptId
    code: FailureCode
    worker: Incarnation


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The connection to this life of a worker broke, or could not be made."""

    now_s: float
    worker: Incarnation


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody wants the answer any more."""

    now_s: float


@dataclass(frozen=True, slots=True)
class MachineFailed:
    """The machine raised `InvariantError`; the request is ended as a fault of ours."""

    now_s: float


Event = (
    Submitted
    | Placed
    | Rejected
    | ConductorLost
    | TimerFired
    | TokenReceived
    | AttemptGivenBack
    | WorkerLost
    | ClientGone
    | MachineFailed
)


# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPlacement:
    """Send to the Conductor; the answer is `Placed`, `Rejected` or `ConductorLost`."""

    message: PlaceRequest


@dataclass(frozen=True, slots=True)
class SendToPrefill:
    """Send to this life of a prefill worker; `WorkerLost` if that cannot be."""

    worker: WorkerRef
    message: PrefillRequest | CancelPrefill


@dataclass(frozen=True, slots=True)
class SendToDecode:
    """Send to this life of a decode or coupled worker; `WorkerLost` if that cannot be."""

    worker: WorkerRef
    message: DecodeRequest | CancelDecode


@dataclass(frozen=True, slots=True)
class TellConductor:
    """Send one way; lost when there is no Conductor."""

    message: PrefillEnded | AttemptEnded


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `TimerFired` at this time; replaces the timer set before."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StreamToken:
    """The next output token, in order, and the text that became safe to show with it."""

    token: TokenEmitted
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class NeverFits:
    """No worker could ever hold this request."""


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Refused for load, before anything was generated."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No worker could serve it within the bounds."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine failed on this request twice, or our own bookkeeping did."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The client left."""


Outcome = Finished | NeverFits | Overloaded | Unavailable | EngineFailed | Abandoned


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The request is over. `text` is the rest that was held back."""

    outcome: Outcome
    text: str
    num_output_tokens: int


Action = (
    AskPlacement
    | SendToPrefill
    | SendToDecode
    | TellConductor
    | SetTimer
    | StreamToken
    | EndRequest
)
