"""The decode worker's decisions. Pure: `DecodeState.handle(event, now_s) -> list[Action]`.

The life of an attempt whose prefill runs elsewhere:

1. `preparing`: the request is here. What `sources` name is fetched to this host's pool node, slots
   for the other blocks are reserved there (a private one for a tail that is not full), and the
   prefill worker is told the slots. Blocks that could not be fetched are reserved and sent later.
2. `receiving`: every block has a slot or is here. Commits come in, and the first token.
3. `ready`: all blocks are committed and the first token is known; the prefill worker is released.
   The attempt waits for room in the batch.
4. `loading`: paged blocks are its own. What the paged cache does not know already is copied and
   checked while the batch goes on. Then the transfer is closed.
5. `running`: in every step. Blocks that become full are published to the pool.
6. `ended`: finished, cancelled, failed, or preempted. A step in which all have ended stops between
   two layers. Paged blocks and the transfer are given back as soon as nobody works on them. A
   preempted attempt is given back to the gateway when its full blocks are in the pool, so that its
   next prefill finds them.

For a coupled worker (`prefill` is `None`) `preparing` leases and fetches what may be reused, there
is no `receiving`, and `running` starts with chunks of the known tokens. A block that is missing or
corrupt then only shortens the reused prefix.

Only the newest attempt of a request lives; what names an older or unknown one changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import assert_never

from core.batching import ChunkBatcher
from core.config import DecodeConfig
from core.errors import InvariantError
from core.ids import AttemptId, Incarnation, PoolRef, RequestId
from core.messages.to_conductor import TransferTotals, WorkerReport
from core.messages.to_decode import DecodeRequest
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.requests import finish_reason
from decode import events as ev
from decode.attempts import Attempt, PastRequests, Phase
from decode.load import decode_load, prefill_load
from decode.receiving import Receiving, ReceivingEvent
from decode.running import RunningBatch
from engine.base import ModelSpec, SequenceResult

MAX_EARLY_TOKENS = 1024

READY_TIMEOUT_S = 240.0
"""How long a request may wait for room; less than the time to live of its leases."""

_BEFORE_READY = (Phase.PREPARING, Phase.RECEIVING)


class DecodeState:
    """All attempts of one decode worker. `chunks` makes it a coupled one."""

    def __init__(
        self,
        config: DecodeConfig,
        spec: ModelSpec,
        num_blocks: int,
        chunks: ChunkBatcher | None = None,
    ) -> None:
        self.draining = False
        self.num_generated_tokens = 0
        self.num_preempted = 0
        self.num_corrupt = 0
        self._config = config
        self._block_size = spec.block_size
        self._batch = RunningBatch(config, spec, num_blocks, chunks, self._act)
        self._receiving = Receiving(self._act, self._fail, lambda: self._pool)
        self._pool: PoolRef | None = None
        self._pasts = PastRequests()
        self._attempts: dict[AttemptId, Attempt] = {}
        self._live: dict[RequestId, Attempt] = {}
        self._preempted: set[AttemptId] = set()
        self._early: OrderedDict[AttemptId, ev.FirstTokenReceived] = OrderedDict()
        self._actions: list[ev.Action] = []
        self._now_s = 0.0

    # --- what others see ---

    def attempts(self) -> tuple[AttemptId, ...]:
        """Return the attempts that live."""
        return tuple(a.id for a in self._live.values())

    def report(self, step_s: float, transfers: tuple[TransferTotals, ...]) -> WorkerReport:
        """Return the load for the Conductor; the caller measured `step_s` and `transfers`."""
        live, free_blocks = self._live.values(), self._batch.allocator.num_available
        return WorkerReport(
            prefill=prefill_load(live, free_blocks) if self._batch.computes_prompts else None,
            decode=decode_load(live, free_blocks, step_s),
            draining=self.draining,
            transfers=transfers,
        )

    def counters(self) -> dict[str, float]:
        """Return what `/metrics` shows; gauges are 0 when nothing is held."""
        num_running = len(self._in_phase(Phase.RUNNING))
        allocator = self._batch.allocator
        return {
            "requests_running": num_running,
            "requests_waiting": len(self._live) - num_running,
            "requests_ending": len(self._attempts) - len(self._live) + len(self._preempted),
            "kv_blocks_in_use": allocator.num_in_use,
            "kv_cache_usage": allocator.num_in_use / allocator.num_blocks,
            "generation_tokens_total": self.num_generated_tokens,
            "preemptions_total": self.num_preempted,
            "blocks_published_total": self._batch.publishing.num_committed,
            "corrupt_blocks_total": self.num_corrupt,
        }

    def _in_phase(self, phase: Phase) -> list[Attempt]:
        return [a for a in self._live.values() if a.phase is phase]

    # --- events ---

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take note of `event` at `now_s` (monotonic) and return what to do, in this order."""
        self._now_s = now_s
        self._take(event)
        self._batch.admit(self._in_phase(Phase.READY), now_s)
        for attempt in self._in_phase(Phase.RUNNING):
            self._close_transfer(attempt)
        running, loading = self._in_phase(Phase.RUNNING), self._in_phase(Phase.LOADING)
        for attempt in self._batch.start_step(running, loading=bool(loading)):
            self._preempt(attempt)
        if (publication := self._batch.publishing.next_batch()) is not None:
            self._act(publication)
        actions, self._actions = self._actions, []
        return actions

    def _act(self, action: ev.Action) -> None:
        self._actions.append(action)

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.PoolConnected(ref=ref):
                self._pool = ref
            case ev.PoolLost():
                self._lose_pool()
            case ev.RequestReceived(request=request):
                self._receive_request(request)
            case ev.Cancelled(attempt=attempt):
                self._cancel(attempt)
            case ev.GatewayLost(gateway=gateway):
                self._lose_gateway(gateway)
            case ev.FirstTokenReceived():
                self._take_first_token(event)
            case ev.PrefillGone() | ev.PrefillLost():
                self._lose_prefill(event)
            case (
                ev.SlotsReserved()
                | ev.ReserveFailed()
                | ev.PrefixFetched()
                | ev.CommitsReceived()
                | ev.LossReceived()
            ):
                self._hear_of_blocks(event)
            case ev.BlocksLoaded() | ev.BlockCorrupt() | ev.LoadFailed():
                self._end_load(event)
            case ev.StepComputed(results=results):
                self._end_step(results)
            case ev.EngineFailed(detail=detail):
                for member, _ in self._batch.take_step():
                    self._fail(member, FailureCode.ENGINE_ERROR, detail)
                    self._reap(member)
            case ev.StepAbandoned():
                for member, _ in self._batch.take_step():
                    self._reap(member)
            case ev.PublishEnded(publish_id=publish_id, num_committed=num_committed):
                self._batch.publishing.end(publish_id, num_committed)
                self._report_preempted()
            case ev.DrainStarted():
                self.draining = True
            case ev.TimePassed():
                self._look_at_deadlines()
            case _:
                assert_never(event)

    # --- beginnings ---

    def _receive_request(self, request: DecodeRequest) -> None:
        past = self._pasts.of(request.attempt.request)
        if request.attempt.attempt <= past.attempt or request.attempt in self._attempts:
            return
        past.attempt = request.attempt.attempt
        self._end_request(request.attempt)
        try:
            attempt = Attempt.of(request, past, self._block_size, self._now_s)
        except ValueError as error:
            self._act(ev.SendFailure(request.attempt, FailureCode.ENGINE_ERROR, str(error)))
            return
        refusal = self._refusal(attempt)
        if refusal is not None:
            self._act(ev.SendFailure(attempt.id, *refusal))
            return
        self._attempts[attempt.id] = self._live[attempt.id.request] = attempt
        self._receiving.start(attempt)
        early = self._early.pop(attempt.id, None)
        if early is not None:
            self._take_first_token(early)
        self._see_progress(attempt)

    def _refusal(self, attempt: Attempt) -> tuple[FailureCode, str] | None:
        if self.draining:
            return FailureCode.DRAINING, "this worker takes no new requests"
        needed, num_blocks = attempt.sequence.max_blocks, self._batch.allocator.num_blocks
        if needed > num_blocks:
            return FailureCode.NEVER_FITS, f"may need {needed} blocks; there are {num_blocks}"
        if len(self._live) - len(self._in_phase(Phase.RUNNING)) >= self._config.max_queued_requests:
            return FailureCode.QUEUE_FULL, f"{self._config.max_queued_requests} requests wait"
        if attempt.coupled and not self._batch.computes_prompts:
            return FailureCode.ENGINE_ERROR, "this decode worker does not compute prompts"
        if not attempt.coupled and self._pool is None:
            return FailureCode.POOL_LOST, "the pool node is gone"
        return None

    def _take_first_token(self, event: ev.FirstTokenReceived) -> None:
        message = event.message
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            self._keep_early(event)
            return
        prefill = attempt.request.prefill
        if prefill is None or prefill.incarnation != event.sender:
            return
        if attempt.phase in _BEFORE_READY and attempt.first_token_id is None:
            attempt.first_token_id = message.token_id
            attempt.progress_s = self._now_s
            if message.finished:
                self._end(attempt)
            self._see_progress(attempt)

    def _keep_early(self, event: ev.FirstTokenReceived) -> None:
        """Keep a first token that overtook its request, unless the attempt is over."""
        attempt = event.message.attempt
        if attempt.attempt > self._pasts.of(attempt.request).attempt:
            self._early[attempt] = event
            if len(self._early) > MAX_EARLY_TOKENS:
                self._early.popitem(last=False)

    def _hear_of_blocks(self, event: ReceivingEvent) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None:
            return
        if isinstance(event, ev.SlotsReserved | ev.ReserveFailed | ev.PrefixFetched):
            attempt.busy -= 1
        if attempt.phase in _BEFORE_READY:
            self._receiving.handle(attempt, event, self._now_s)
            self._see_progress(attempt)
        self._reap(attempt)

    def _see_progress(self, attempt: Attempt) -> None:
        """Move an attempt on to `receiving` or `ready` if it has come so far."""
        if attempt.phase is Phase.PREPARING and not attempt.busy and not attempt.unreserved:
            attempt.phase = Phase.READY if attempt.coupled else Phase.RECEIVING
        token_id = attempt.first_token_id
        if attempt.phase is not Phase.RECEIVING or token_id is None or not attempt.all_here:
            return
        assert attempt.request.prefill is not None
        self._act(ev.SendRelease(attempt.id, attempt.request.prefill))
        attempt.tokens.append(token_id)
        attempt.phase = Phase.READY
        if finish_reason(attempt.request.params, attempt.num_output, token_id) is not None:
            self._end(attempt)

    # --- the running batch ---

    def _end_load(self, event: ev.BlocksLoaded | ev.BlockCorrupt | ev.LoadFailed) -> None:
        attempt = self._attempts[event.attempt]
        attempt.busy -= 1
        problem: str | None = None
        match event:
            case ev.BlocksLoaded():
                num_good = len(attempt.leased_prefix(attempt.num_local))
            case ev.BlockCorrupt(num_good=num_good, handle=handle):
                self.num_corrupt += 1
                self._act(ev.ReportCorrupt(handle))
                problem = "a block's checksum is wrong"
            case ev.LoadFailed(num_good=num_good, detail=problem):
                pass
            case _:
                assert_never(event)
        if attempt.phase is Phase.LOADING:
            if problem is None or attempt.coupled:
                self._batch.join(attempt, num_good, self._now_s)
            else:
                self._fail(attempt, FailureCode.POOL_LOST, problem)
        self._reap(attempt)

    def _end_step(self, results: Sequence[SequenceResult]) -> None:
        frames: dict[Incarnation, list[TokenEmitted]] = {}
        finished: list[Attempt] = []
        for (attempt, num_tokens), result in zip(self._batch.take_step(), results, strict=True):
            if attempt.phase is Phase.ENDED:
                self._reap(attempt)
                continue
            token = self._batch.advance(
                attempt, num_tokens, result, publish=self._pool is not None, now_s=self._now_s
            )
            attempt.progress_s = self._now_s
            if token is not None:
                self.num_generated_tokens += 1
                frames.setdefault(attempt.id.request.gateway, []).append(token)
                if token.finish is not None:
                    finished.append(attempt)
        for gateway, tokens in frames.items():
            self._act(ev.SendTokens(gateway, tuple(tokens)))
        for attempt in finished:
            self._end(attempt)

    def _preempt(self, attempt: Attempt) -> None:
        """Give an attempt up whose blocks were taken, once its full blocks are in the pool."""
        self.num_preempted += 1
        self._pasts.of(attempt.id.request).num_preempted += 1
        self._preempted.add(attempt.id)
        self._end(attempt)
        self._report_preempted()

    def _report_preempted(self) -> None:
        owners = self._batch.publishing.owners() if self._preempted else set()
        for attempt in sorted(self._preempted - owners):
            self._preempted.discard(attempt)
            self._act(ev.SendFailure(attempt, FailureCode.PREEMPTED, "older requests need room"))

    # --- endings ---

    def _fail(self, attempt: Attempt, code: FailureCode, detail: str) -> None:
        if attempt.phase is not Phase.ENDED:
            self._act(ev.SendFailure(attempt.id, code, detail))
            self._end(attempt)

    def _end(self, attempt: Attempt) -> None:
        """The attempt computes nothing more; give its things back as soon as that is safe."""
        if attempt.phase is Phase.ENDED:
            return
        attempt.phase = Phase.ENDED
        del self._live[attempt.id.request]
        self._batch.forget_prompt(attempt)
        if attempt.in_step and not self._batch.step_is_wanted:
            self._act(ev.AbandonStep())
        self._reap(attempt)

    def _reap(self, attempt: Attempt) -> None:
        if attempt.phase is not Phase.ENDED or attempt.busy or attempt.in_step:
            return
        if self._attempts.pop(attempt.id, None) is not None:
            self._batch.remove(attempt)
            self._close_transfer(attempt)

    def _close_transfer(self, attempt: Attempt) -> None:
        if attempt.transfer_open and not attempt.busy:
            attempt.transfer_open = False
            self._act(ev.CloseTransfer(attempt.id))

    def _end_request(self, newest: AttemptId) -> None:
        """End attempts of the request that are not newer than `newest`, silently."""
        live = self._live.get(newest.request)
        if live is not None and live.id <= newest:
            self._end(live)
        self._preempted = {a for a in self._preempted if a.request != newest.request or a > newest}

    def _cancel(self, attempt: AttemptId) -> None:
        past = self._pasts.of(attempt.request)
        past.attempt = max(past.attempt, attempt.attempt)
        self._early.pop(attempt, None)
        self._end_request(attempt)

    def _lose_gateway(self, gateway: Incarnation) -> None:
        for attempt in list(self._live.values()):
            if attempt.id.request.gateway == gateway:
                self._end(attempt)
        self._preempted = {a for a in self._preempted if a.request.gateway != gateway}

    def _lose_prefill(self, event: ev.PrefillGone | ev.PrefillLost) -> None:
        """Give up attempts that still wait for something of this prefill worker."""
        for attempt in list(self._live.values()):
            prefill = attempt.request.prefill
            if prefill is None or prefill.incarnation != event.sender:
                continue
            meant = isinstance(event, ev.PrefillLost) or event.attempt == attempt.id
            if meant and attempt.phase in _BEFORE_READY:
                self._fail(attempt, FailureCode.PEER_LOST, "the prefill worker is gone")
        if isinstance(event, ev.PrefillLost):
            lost = [k for k, early in self._early.items() if early.sender == event.sender]
            for attempt_id in lost:
                del self._early[attempt_id]

    def _lose_pool(self) -> None:
        """Whatever was only in that life of the pool node is gone.

        Loads under way read mapped memory that outlives the node, and are checked.
        """
        self._pool = None
        self._batch.publishing.drop_queued()
        self._report_preempted()
        for attempt in list(self._live.values()):
            if attempt.coupled:
                if attempt.phase in (*_BEFORE_READY, Phase.READY):
                    attempt.leased.clear()
            elif attempt.phase in (*_BEFORE_READY, Phase.READY):
                self._fail(attempt, FailureCode.POOL_LOST, "the pool node is gone")

    def _look_at_deadlines(self) -> None:
        for attempt in list(self._live.values()):
            match attempt.phase:
                case Phase.PREPARING:
                    limit_s = self._config.handoff_timeout_s
                    if attempt.unreserved:
                        self._receiving.reserve(attempt, set(attempt.unreserved))
                case Phase.RECEIVING:
                    # A prompt may stand in a long queue; that its worker lives is known.
                    queued = attempt.first_token_id is None
                    config = self._config
                    limit_s = config.queue_timeout_s if queued else config.handoff_timeout_s
                case Phase.READY:
                    limit_s = READY_TIMEOUT_S
                case Phase.LOADING:
                    limit_s = self._config.load_timeout_s
                case Phase.RUNNING | Phase.ENDED:
                    continue
                case _:
                    assert_never(attempt.phase)
            if self._now_s - attempt.progress_s > limit_s:
                self._fail(attempt, FailureCode.TIMED_OUT, f"no progress while {attempt.phase}")

    # --- checks ---

    def validate(self) -> None:
        """Re-derive every index and count; for tests. Raises `InvariantError`."""
        self._batch.validate(self._attempts.values())
        live = {a.id.request: a for a in self._attempts.values() if a.phase is not Phase.ENDED}
        if live != self._live:
            raise InvariantError("the live attempts are not those that have not ended")
        for attempt in self._attempts.values():
            story = f"{attempt.id} ({attempt.phase}, busy {attempt.busy})"
            if attempt.busy < 0:
                raise InvariantError(f"{story}: more outcomes than orders")
            if attempt.phase is Phase.ENDED and not (attempt.busy or attempt.in_step):
                raise InvariantError(f"{story}: nothing keeps it")
            if attempt.phase is Phase.RECEIVING and not attempt.coupled:
                self._validate_receiving(attempt, story)

    def _validate_receiving(self, attempt: Attempt, story: str) -> None:
        awaited = set(attempt.awaited.values())
        here = set(attempt.leased)
        if awaited & here:
            raise InvariantError(f"{story}: blocks {sorted(awaited & here)} are here and awaited")
        known = awaited | here | attempt.unreserved
        if not attempt.busy and known != set(range(attempt.num_blocks)):
            raise InvariantError(f"{story}: only blocks {sorted(known)} are accounted for")
