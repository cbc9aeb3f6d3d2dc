"""The gateway's view of a request, as a pure state machine (`docs/wire.md`, section 3).

One request is one generation: a choice of a prompt. Its life here:

1. `Submitted` asks the Conductor for a placement (`AskPlacement`).
2. `Placed` sends the request to the prefill and the decode worker, or to a coupled one.
3. `TokenReceived` grows the token log. Tokens of one attempt come over two connections, so those
   ahead of their turn are held, and those already logged are dropped.
4. A failed attempt ends in `waiting`; its timer starts the next one with prompt and emitted tokens.
5. `EndRequest` comes exactly once; so does `AttemptEnded` for every attempt that was asked for.

No clock and no I/O: every event carries `now_s` of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import assert_never

from cluster.request_events import (
    Abandoned,
    Action,
    AskPlacement,
    AttemptGivenBack,
    ClientGone,
    ConductorLost,
    EndRequest,
    EngineFailed,
    Event,
    Finished,
    MachineFailed,
    NeverFits,
    Outcome,
    OutputText,
    Overloaded,
    Placed,
    Rejected,
    RequestSpec,
    RetryLimits,
    SendToDecode,
    SendToPrefill,
    SetTimer,
    StreamToken,
    Submitted,
    TellConductor,
    TextDelta,
    TimerFired,
    TokenReceived,
    Unavailable,
    WorkerLost,
)
from core.errors import InvariantError
from core.hashing import extend_block_hashes, join_hashes, pack_token_ids
from core.ids import AttemptId, BlockHash, Incarnation, WorkerRef
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
from core.requests import FinishReason

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class State(StrEnum):
    """Where a request stands."""

    NEW = "new"
    PLACING = "placing"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


RUNNING = frozenset({State.PREFILLING, State.DECODING})

TRANSITIONS: frozenset[tuple[State, type, State]] = frozenset(
    {
        (State.NEW, Submitted, State.PLACING),
        (State.PLACING, Placed, State.PREFILLING),
        (State.PLACING, Rejected, State.ENDED),
        (State.PLACING, Rejected, State.WAITING),
        (State.PLACING, ConductorLost, State.WAITING),
        (State.WAITING, TimerFired, State.PLACING),
        (State.WAITING, TimerFired, State.ENDED),
        (State.PREFILLING, TokenReceived, State.DECODING),
    }
    | {(s, TokenReceived, State.ENDED) for s in RUNNING}
    | {(s, e, State.WAITING) for s in RUNNING for e in (WorkerLost, AttemptGivenBack, TimerFired)}
    | {(s, e, State.ENDED) for s in RUNNING for e in (WorkerLost, AttemptGivenBack, TimerFired)}
    | {(s, e, State.ENDED) for s in State for e in (ClientGone, MachineFailed)}
)
"""Every change of state that there is. `handle` checks itself against it."""


class RequestMachine:
    """Decides everything about one request; see the module's docstring."""

    def __init__(self, spec: RequestSpec, text: OutputText, limits: RetryLimits) -> None:
        self.spec = spec
        self.state = State.NEW
        self.output_token_ids: list[int] = []
        self.num_attempts = 0
        self.placement: Placement | None = None
        self._asked: AttemptId | None = None  # ended while this one was being placed
        self._text = text
        self._limits = limits
        self._hashes: list[BlockHash] = list(spec.block_hashes)
        self._held: dict[int, TokenEmitted] = {}
        self._base_seq = 0
        self._excluded: set[Incarnation] = set()
        self._num_engine_errors = 0
        self._num_failures = self._num_waits = 0
        self._window_start_s: float | None = None
        self._retry_at_s = self._progress_s = 0.0

    @property
    def attempt(self) -> AttemptId:
        """The attempt that counts now; anything of an older one is dropped."""
        return AttemptId(self.spec.request, self.num_attempts)

    def workers(self) -> tuple[WorkerRef, ...]:
        """The workers of the running attempt."""
        if self.placement is None:
            return ()
        both = (self.placement.prefill, self.placement.decode)
        return tuple(w for w in both if w is not None)

    def handle(self, event: Event) -> list[Action]:
        """Take an event and return what is to be done, in order."""
        before = self.state
        actions = self._handle(event)
        if before is not self.state and (before, type(event), self.state) not in TRANSITIONS:
            raise InvariantError(f"{self.attempt}: {before} -> {self.state} by {event}")
        return actions

    def _handle(self, event: Event) -> list[Action]:
        if self.state is State.ENDED:
            return self._handle_late(event)
        match event:
            case Submitted():
                return self._place()
            case Placed(now_s, attempt, placement):
                return self._placed(now_s, placement) if self._is_awaited(attempt) else []
            case Rejected(now_s, attempt, rejection):
                return self._rejected(now_s, rejection) if self._is_awaited(attempt) else []
            case ConductorLost(now_s, attempt):
                if not self._is_awaited(attempt):
                    return []
                return [self._attempt_ended(), *self._wait(now_s, self._backoff_s())]
            case TimerFired(now_s):
                return self._timer_fired(now_s)
            case TokenReceived(now_s, token):
                return self._token_received(now_s, token)
            case AttemptGivenBack():
                return self._given_back(event)
            case WorkerLost(now_s, worker):
                if not self._needs(worker):
                    return []
                return self._failed(now_s, gone=worker, suspect=worker)
            case ClientGone():
                return self._end(Abandoned())
            case MachineFailed():
                return self._end(EngineFailed())
            case _:
                assert_never(event)

    def _handle_late(self, event: Event) -> list[Action]:
        """Only an attempt still asked for when the request ended has anything left to do."""
        match event:
            case Placed(_, attempt) | ConductorLost(_, attempt) if attempt == self._asked:
                self._asked = None
                return [TellConductor(AttemptEnded(attempt, 0))]
            case _:
                return []

    # --- placing ---

    def _is_awaited(self, attempt: AttemptId) -> bool:
        return self.state is State.PLACING and attempt == self.attempt

    def _known_token_ids(self) -> tuple[int, ...]:
        return (*self.spec.prompt_token_ids, *self.output_token_ids)

    def _place(self) -> list[Action]:
        self.state = State.PLACING
        self.num_attempts += 1
        self._base_seq = len(self.output_token_ids)
        known, size = self._known_token_ids(), self.spec.block_size
        parent = self._hashes[-1] if self._hashes else self.spec.root
        self._hashes += extend_block_hashes(parent, known[len(self._hashes) * size :], size)
        num_new = self.spec.params.max_tokens - self._base_seq
        message = PlaceRequest(
            attempt=self.attempt,
            num_tokens=len(known),
            num_new_tokens=num_new,
            block_hashes=join_hashes(self._hashes),
            needs_decode=num_new > 1,
            priority=self.spec.priority,
            excluded=tuple(sorted(self._excluded)),
        )
        return [AskPlacement(message)]

    def _placed(self, now_s: float, placement: Placement) -> list[Action]:
        self.placement = placement
        if not self.workers():
            raise InvariantError(f"{self.attempt}: a placement without a worker")
        self.state = State.PREFILLING
        self._progress_s = now_s
        known, params, reuse = self._known_token_ids(), self.spec.params, self.spec.reuse
        if self._base_seq:  # prompt logprobs came with the first token and are not asked again
            params, reuse = dataclasses.replace(params, prompt_logprobs=None), True
        token_ids, hashes = pack_token_ids(known), join_hashes(self._hashes)
        num_reusable = (len(known) - 1) // self.spec.block_size if reuse else 0
        prefill, decode = placement.prefill, placement.decode
        actions: list[Action] = []
        if prefill is not None:
            to_prefill = PrefillRequest(
                self.attempt, token_ids, self._base_seq, hashes, num_reusable, params,
                placement.sources, decode, self.spec.priority,
            )  # fmt: skip
            actions.append(SendToPrefill(prefill, to_prefill))
        if decode is not None:
            to_decode = DecodeRequest(
                self.attempt, token_ids, self._base_seq, hashes, self.spec.root, num_reusable,
                params, placement.sources, prefill, self.spec.priority,
            )  # fmt: skip
            actions.append(SendToDecode(decode, to_decode))
        return [*actions, SetTimer(now_s + self._limits.stall_s)]

    def _rejected(self, now_s: float, rejection: Rejection) -> list[Action]:
        if self.num_attempts == 1 and rejection.overloaded:
            return self._end(Overloaded(rejection.retry_after_s))
        # Better a worker that failed before than none: it may be well again.
        self._excluded.clear()
        pause_s = min(max(rejection.retry_after_s, FIRST_BACKOFF_S), MAX_BACKOFF_S)
        return self._wait(now_s, pause_s)

    # --- waiting ---

    def _backoff_s(self) -> float:
        """0 at first, then doubling: a single fault costs no pause."""
        if self._num_waits == 0:
            return 0.0
        doubled: float = FIRST_BACKOFF_S * 2 ** min(self._num_waits - 1, 10)
        return min(doubled, MAX_BACKOFF_S)

    def _wait(self, now_s: float, pause_s: float) -> list[Action]:
        self.state = State.WAITING
        self.placement = None
        self._held.clear()
        if self._window_start_s is None:
            self._window_start_s = now_s
        self._num_waits += 1
        self._retry_at_s = now_s + pause_s
        return [SetTimer(self._retry_at_s)]

    def _timer_fired(self, now_s: float) -> list[Action]:
        if self.state is State.WAITING:
            if now_s < self._retry_at_s:
                return [SetTimer(self._retry_at_s)]
            assert self._window_start_s is not None
            if now_s - self._window_start_s > self._limits.window_s:
                return self._end(Unavailable(MAX_BACKOFF_S))
            return self._place()
        if self.state in RUNNING:
            stalled_at_s = self._progress_s + self._limits.stall_s
            if now_s < stalled_at_s:
                return [SetTimer(stalled_at_s)]
            suspect = self.workers()[-1 if self.state is State.DECODING else 0]
            return self._failed(now_s, gone=None, suspect=suspect.incarnation)
        return []

    # --- running ---

    def _token_received(self, now_s: float, token: TokenEmitted) -> list[Action]:
        next_seq = len(self.output_token_ids)
        in_bounds = next_seq <= token.seq < self.spec.params.max_tokens
        if self.state not in RUNNING or token.attempt != self.attempt or not in_bounds:
            return []
        self._held.setdefault(token.seq, token)
        actions: list[Action] = []
        while (due := self._held.pop(len(self.output_token_ids), None)) is not None:
            actions += self._log(now_s, due)
            if self.state is State.ENDED:
                break
        return actions

    def _log(self, now_s: float, token: TokenEmitted) -> list[Action]:
        actions: list[Action] = []
        if len(self.output_token_ids) == self._base_seq and token.stats is not None:
            stats = token.stats
            cached_tokens = stats.cached_local_tokens + stats.cached_pool_tokens
            ended = PrefillEnded(
                self.attempt, stats.computed_tokens, cached_tokens, stats.queue_s,
                stats.load_s + stats.compute_s,
            )  # fmt: skip
            actions.append(TellConductor(ended))
        self.state = State.DECODING
        self._progress_s, self._window_start_s = now_s, None
        self._num_failures = self._num_waits = 0
        self.output_token_ids.append(token.token_id)
        is_stop_token = token.finish is FinishReason.STOP
        delta = self._text.push(token.token_id, ends_generation=is_stop_token)
        actions.append(StreamToken(token, delta.text))
        if delta.stopped:
            return actions + self._end(Finished(FinishReason.STOP), stopped=True)
        if token.finish is not None:
            return actions + self._end(Finished(token.finish), by_worker=True)
        return actions

    def _needs(self, worker: Incarnation) -> bool:
        """Whether the running attempt fails with this worker.

        The prefill worker has done its part once the decode worker gave a token of its own.
        """
        if self.placement is None or worker not in {w.incarnation for w in self.workers()}:
            return False
        prefill, decode = self.placement.prefill, self.placement.decode
        if prefill is None or decode is None or worker == decode.incarnation:
            return True
        return len(self.output_token_ids) < self._base_seq + 2

    def _given_back(self, event: AttemptGivenBack) -> list[Action]:
        if event.attempt != self.attempt or not self._needs(event.worker):
            return []
        match event.code:
            case FailureCode.NEVER_FITS:
                return self._end(NeverFits())
            case FailureCode.ENGINE_ERROR:
                self._num_engine_errors += 1
                if self._num_engine_errors > 1:
                    return self._end(EngineFailed())
                return self._failed(event.now_s, gone=event.worker, suspect=event.worker)
            case FailureCode.PREEMPTED:
                self._window_start_s = event.now_s
                return self._failed(event.now_s, gone=event.worker, suspect=None)
            case FailureCode.PEER_LOST:
                others = [w.incarnation for w in self.workers() if w.incarnation != event.worker]
                suspect = others[0] if others else event.worker
                return self._failed(event.now_s, gone=event.worker, suspect=suspect)
            case (
                FailureCode.POOL_LOST
                | FailureCode.TIMED_OUT
                | FailureCode.QUEUE_FULL
                | FailureCode.DRAINING
            ):
                return self._failed(event.now_s, gone=event.worker, suspect=event.worker)
            case _:
                assert_never(event.code)

    def _failed(
        self, now_s: float, *, gone: Incarnation | None, suspect: Incarnation | None
    ) -> list[Action]:
        """Give the attempt up. `gone` has let go of it; `None` for `suspect` blames nobody."""
        if suspect is not None:
            self._excluded.add(suspect)
            self._num_failures += 1
            if self._num_failures >= self._limits.max_failures:
                return self._end(Unavailable(MAX_BACKOFF_S))
        actions = [*self._cancels(gone), self._attempt_ended()]
        return [*actions, *self._wait(now_s, self._backoff_s())]

    # --- ending ---

    def _cancels(self, gone: Incarnation | None, *, by_worker: bool = False) -> list[Action]:
        if self.placement is None:
            return []
        prefill, decode = self.placement.prefill, self.placement.decode
        actions: list[Action] = []
        # A prefill worker that knows of the end may still be publishing the prompt's blocks.
        if prefill is not None and prefill.incarnation != gone and not by_worker:
            actions.append(SendToPrefill(prefill, CancelPrefill(self.attempt)))
        if decode is not None and decode.incarnation != gone:
            actions.append(SendToDecode(decode, CancelDecode(self.attempt)))
        return actions

    def _attempt_ended(self) -> TellConductor:
        num_tokens = len(self.output_token_ids) - self._base_seq
        return TellConductor(AttemptEnded(self.attempt, num_tokens))

    def _end(
        self, outcome: Outcome, *, stopped: bool = False, by_worker: bool = False
    ) -> list[Action]:
        actions = self._cancels(None, by_worker=by_worker)
        if self.state in RUNNING:
            actions.append(self._attempt_ended())
        elif self.state is State.PLACING and not isinstance(outcome, Overloaded):
            self._asked = self.attempt  # AttemptEnded must not overtake the placement
        self.state = State.ENDED
        self.placement = None
        self._held.clear()
        rest = TextDelta("", stopped=False) if stopped else self._text.finish()
        if rest.stopped and isinstance(outcome, Finished):
            outcome = Finished(FinishReason.STOP)
        return [*actions, EndRequest(outcome, rest.text, len(self.output_token_ids))]
