"""Messages that a gateway receives from workers, on the connections it opened to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.ids import AttemptId
from core.requests import FinishReason, PositionLogprobs
from core.wire import MessageSet


class FailureCode(StrEnum):
    """Why a worker gives an attempt back. All but the first two are worth another attempt."""

    NEVER_FITS = "never_fits"
    ENGINE_ERROR = "engine_error"
    PREEMPTED = "preempted"
    POOL_LOST = "pool_lost"
    PEER_LOST = "peer_lost"
    TIMED_OUT = "timed_out"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """Where the known tokens of an attempt came from; the first three sum to all of them.

    `cached_local_tokens` were in the worker's own paged cache, `cached_pool_tokens` came from the
    pool. Seconds are durations on the worker's monotonic clock.
    """

    computed_tokens: int
    cached_local_tokens: int
    cached_pool_tokens: int
    queue_s: float
    load_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class TokenEmitted:
    """Output number `seq` (from 0, counted over all attempts) of a request.

    `finish` is set on the last one. `stats` and `prompt_logprobs` come with an attempt's first
    token.
    """

    attempt: AttemptId
    seq: int
    token_id: int
    logprobs: PositionLogprobs | None
    finish: FinishReason | None
    stats: PrefillStats | None
    prompt_logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """One way: all tokens of one step that belong to this gateway."""

    tokens: tuple[TokenEmitted, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """One way: the worker has let go of the attempt. `detail` is for the log, not for clients."""

    attempt: AttemptId
    code: FailureCode
    detail: str


MESSAGES = MessageSet(TokenFrame, AttemptFailed)
"""What a gateway may be sent by a worker."""
