"""Everything a prefill worker decides. Pure.

Life of a request here, one attempt of it:

1. `RequestReceived`. What can never fit is refused at once, and so is what exceeds the queue. An
   older attempt of the request ends. Slots that the decode worker named earlier wait for it.
2. *Queued* until the paged cache has room for all its blocks, in order of (priority, arrival). An
   attempt whose next block another one is just making waits for that block, and lets others pass.
3. *Loading*: what the own paged cache holds is held; the next blocks are leased at the host's pool
   node, or fetched there from the nodes that the placement names; slots are copied into paged
   blocks and checked there. Whatever goes wrong only shortens the prefix. At least the last known
   token is left to compute.
4. *Computing*: the batcher cuts chunks. With the first one, slots to publish full blocks in are
   reserved at the host's pool node, unless the decode worker lives there: then its slots are that
   copy. Each layer of a block that this chunk completes goes to every slot that waits for it, while
   the next layer is computed. A full block can be found in the paged cache after its chunk.
5. *Handing off*: the first token is sent. Unless it ended the generation, blocks are kept for the
   decode worker, which may name more slots, until it releases them. No progress in time fails it.
6. *Ending*, at any moment: nothing new is started, and a chunk whose attempts have all ended stops
   between two layers; blocks are given back when no load, chunk or write touches them any more,
   and the transfer at the pool node is closed.

An attempt is dropped silently by a newer one, a cancel or its gateway's loss; in any other case the
gateway hears of it. The decode worker hears of every end that it did not cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from core.batching import Piece
from core.config import PrefillConfig
from core.errors import InvariantError
from core.ids import AttemptId, Incarnation, PoolRef
from core.messages.to_conductor import PrefillLoad
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.messages.to_pool import SlotReserved
from engine.base import ModelSpec, SequenceResult
from prefill import events as ev
from prefill.admission import Admission
from prefill.attempt import Attempt, Phase, Totals, handed_off
from prefill.batcher import PrefillBatcher
from prefill.chunks import Chunks
from prefill.early import EarlySlots, SeenAttempts
from prefill.push import Push


class PrefillState:
    """All attempts of a worker. Feed it events, do what it says."""

    def __init__(self, config: PrefillConfig, spec: ModelSpec, num_blocks: int) -> None:
        self.totals = Totals()
        self.draining = False
        self._config, self._spec = config, spec
        self._admission = Admission(num_blocks=num_blocks, block_size=spec.block_size)
        batcher = PrefillBatcher(
            max_chunk_tokens=config.max_chunk_tokens,
            max_chunk_requests=config.max_chunk_requests,
            block_size=spec.block_size,
        )
        self._chunks = Chunks(batcher, max_tokens=config.max_chunk_tokens)
        self._attempts: dict[AttemptId, Attempt] = {}
        self._early = EarlySlots(
            max_attempts=config.max_queued_requests, ttl_s=config.handoff_timeout_s
        )
        self._seen = SeenAttempts(4 * config.max_queued_requests)
        self._num_received = 0
        self._own: PoolRef | None = None
        self._actions: list[ev.Action] = []
        self._now_s = 0.0

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take one event; return what to do, in order. `now_s` never goes back."""
        self._now_s = now_s
        self._apply(event)
        for attempt in self._admission.admit(now_s):
            self._lease(attempt)
        self._start_chunk()
        actions, self._actions = self._actions, []
        return actions

    @property
    def load(self) -> PrefillLoad:
        """What there is to do."""
        waiting = [a for a in self._attempts.values() if a.phase in (Phase.QUEUED, Phase.LOADING)]
        computing = [a for a in self._attempts.values() if a.phase is Phase.COMPUTING]
        return PrefillLoad(
            num_waiting=len(waiting),
            num_running=len(computing),
            queued_tokens=sum(a.num_tokens - a.num_computed for a in waiting + computing),
            free_blocks=self._admission.num_available,
        )

    @property
    def attempts(self) -> tuple[AttemptId, ...]:
        """The attempts it works on."""
        return tuple(a.attempt for a in self._attempts.values() if a.phase is not Phase.ENDING)

    @property
    def idle(self) -> bool:
        """Whether nothing at all is held for anybody."""
        unused = self._admission.num_available == self._admission.num_blocks
        return unused and not self._attempts and not self._early

    def _apply(self, event: ev.Event) -> None:
        match event:
            case ev.RequestReceived():
                self._receive(event.work)
            case ev.DecodeSlotsReceived():
                self._receive_slots(event)
            case ev.LayerComputed() | ev.ChunkComputed() | ev.EngineFailed() | ev.ChunkAbandoned():
                self._apply_engine(event)
            case ev.WritesBegun() | ev.SlicesWritten() | ev.BlocksCommitted() | ev.WritesFailed():
                self._apply_push(event)
            case ev.SlotsReserved() | ev.ReservationFailed():
                self._apply_reservation(event)
            case ev.PrefixLeased() | ev.PrefixFetched() | ev.PrefixUnavailable():
                self._apply_found(event)
            case ev.PrefixBlocksLoaded() | ev.PrefixBlockBroken():
                self._apply_loaded(event)
            case ev.Released() | ev.Cancelled() | ev.GatewayLost() | ev.DecodeLost():
                self._apply_peer(event)
            case ev.PoolConnected():
                self._own = event.pool
            case ev.PoolLost():
                self._own = None
            case ev.DrainStarted():
                self.draining = True
            case ev.TimedOut():
                self._time_out()
            case _:
                assert_never(event)

    # --- requests and slots come in ---

    def _receive(self, work: ev.PrefillWork) -> None:
        name = work.attempt
        if name in self._seen:
            return  # repeated, or older than what was seen
        self._end_older(name)
        early = self._early.take_attempt(name)
        refusal = self._refusal(work)
        if refusal is not None:
            self._actions.append(ev.SendFailure(name, *refusal))
            self._refuse_slots(early)
            self.totals.num_failed += 1
            return
        self._num_received += 1
        attempt = Attempt(work, self._spec.block_size, self._now_s, self._num_received)
        attempt.needs_decode = work.decode is not None
        self._attempts[name] = attempt
        self._admission.enqueue(attempt)
        for slots in early:
            self._receive_slots(slots)

    def _refusal(self, work: ev.PrefillWork) -> tuple[FailureCode, str] | None:
        num_tokens = len(work.token_ids)
        num_blocks = -(-num_tokens // self._spec.block_size)
        most = self._spec.max_model_len
        if not 0 < num_tokens <= most or num_blocks > self._admission.num_blocks:
            held = self._admission.num_blocks
            detail = f"{num_tokens} tokens; the model takes {most}, the cache {held} blocks"
            return FailureCode.NEVER_FITS, detail
        if self.draining:
            return FailureCode.DRAINING, "the worker takes no new requests"
        if self._admission.num_queued >= self._config.max_queued_requests:
            return FailureCode.QUEUE_FULL, f"{self._admission.num_queued} requests wait already"
        return None

    def _receive_slots(self, event: ev.DecodeSlotsReceived) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None and event.attempt not in self._seen:
            self._refuse_slots(self._early.add(event, self._now_s))
            return
        decode = None if attempt is None else attempt.work.decode
        if (
            attempt is None
            or decode is None
            or decode.incarnation != event.decode
            or attempt.phase is Phase.ENDING
        ):
            self._refuse_slots([event])
            return
        if attempt.token_id is not None:  # it may have connected after the token was sampled
            self._send_finished(attempt, attempt.token_id)
        if attempt.needs_decode:
            slots = [(s.index, s.handle) for s in event.slots if 0 <= s.index < attempt.num_blocks]
            self._push(attempt, event.pool).add(slots)
            self._progressed(attempt)
            self._pump(attempt)

    def _refuse_slots(self, slots: Iterable[ev.DecodeSlotsReceived]) -> None:
        for decode, attempt in {(event.decode, event.attempt): None for event in slots}:
            self._actions.append(ev.SendPrefillGone(decode, attempt))

    # --- the prefix ---

    def _lease(self, attempt: Attempt) -> None:
        if attempt.num_tokens % self._spec.block_size:
            self._actions.append(ev.ZeroBlock(attempt.block_ids[-1]))
        missing = attempt.reusable[attempt.num_local_blocks :]
        if missing and self._own is not None:
            self._ask(attempt, ev.LeasePrefix(attempt.attempt, missing))
        else:
            self._loaded(attempt, 0)

    def _fetch(self, attempt: Attempt) -> None:
        source = None if self._own is None else attempt.next_source(self._own.incarnation)
        if source is None:
            self._load(attempt)
            return
        attempt.asked_sources.append(source)
        first = attempt.num_local_blocks + len(attempt.leased)
        hashes = attempt.reusable[first : source.first + source.count]
        self._ask(attempt, ev.FetchPrefix(attempt.attempt, source.pool, hashes))

    def _load(self, attempt: Attempt) -> None:
        if not attempt.leased:
            self._loaded(attempt, 0)
            return
        first = attempt.num_local_blocks
        block_ids = tuple(attempt.block_ids[first : first + len(attempt.leased)])
        attempt.loading = True
        blocks = tuple(attempt.leased)
        self._actions.append(ev.LoadBlocks(attempt.attempt, blocks, block_ids))

    def _ask(
        self, attempt: Attempt, action: ev.LeasePrefix | ev.FetchPrefix | ev.ReserveOwnSlots
    ) -> None:
        attempt.num_asked += 1
        attempt.used_pool = True
        self._actions.append(action)

    def _apply_found(
        self, event: ev.PrefixLeased | ev.PrefixFetched | ev.PrefixUnavailable
    ) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or attempt.phase is Phase.ENDING:
            return  # what came is given back with the transfer
        attempt.num_asked -= 1
        if isinstance(event, ev.PrefixUnavailable):
            self._load(attempt)
        else:
            attempt.leased += event.blocks
            self._fetch(attempt)

    def _apply_loaded(self, event: ev.PrefixBlocksLoaded | ev.PrefixBlockBroken) -> None:
        attempt = self._get(event.attempt)
        attempt.loading = False
        num_good = len(attempt.leased)
        if isinstance(event, ev.PrefixBlockBroken):
            num_good = event.num_good
            self.totals.num_broken_blocks += 1
        if attempt.phase is Phase.ENDING:
            self._settle(attempt)
        else:
            self._loaded(attempt, num_good)

    def _loaded(self, attempt: Attempt, num_pool_blocks: int) -> None:
        attempt.num_pool_blocks = num_pool_blocks
        attempt.num_computed = attempt.num_cached_tokens
        attempt.loaded_s = self._now_s
        attempt.phase = Phase.COMPUTING
        self._admission.publish(attempt)
        self._chunks.add(attempt)
        self._pump(attempt)

    # --- computing ---

    def _start_chunk(self) -> None:
        pieces = self._chunks.start()
        if not pieces:
            return
        attempts = [self._attempts[piece.attempt] for piece in pieces]
        steps = [a.step(piece) for a, piece in zip(attempts, pieces, strict=True)]
        self._actions.append(ev.RunChunk(tuple(steps)))
        for attempt, piece in zip(attempts, pieces, strict=True):
            attempt.running_end = piece.end
            if attempt.started_s is None:
                attempt.started_s = self._now_s
                self._reserve_own(attempt)

    def _reserve_own(self, attempt: Attempt) -> None:
        decode, own = attempt.work.decode, self._own
        if own is None or attempt.own_indices:
            return
        if attempt.needs_decode and decode and decode.pool.incarnation == own.incarnation:
            return  # the decode worker's slots are that copy
        # What was loaded from the node a moment ago is still there.
        loaded = range(attempt.num_local_blocks, attempt.num_local_blocks + attempt.num_pool_blocks)
        hashes = attempt.work.block_hashes
        attempt.own_indices = tuple(i for i in range(len(hashes)) if i not in loaded)
        if attempt.own_indices:
            wanted = tuple(hashes[i] for i in attempt.own_indices)
            self._ask(attempt, ev.ReserveOwnSlots(attempt.attempt, wanted))

    def _apply_reservation(self, event: ev.SlotsReserved | ev.ReservationFailed) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or attempt.phase is Phase.ENDING:
            return
        attempt.num_asked -= 1
        if isinstance(event, ev.SlotsReserved):
            attempt.own_pool = event.pool.incarnation
            pairs = zip(attempt.own_indices, event.outcomes, strict=True)
            slots = [(i, o.handle) for i, o in pairs if isinstance(o, SlotReserved)]
            self._push(attempt, event.pool).add(slots)
        self._pump(attempt)

    def _apply_engine(
        self, event: ev.LayerComputed | ev.ChunkComputed | ev.EngineFailed | ev.ChunkAbandoned
    ) -> None:
        if isinstance(event, ev.LayerComputed):
            self._chunks.layers_done = event.layer + 1
            for piece in self._chunks.running:
                self._pump(self._attempts[piece.attempt])
            return
        pieces = self._chunks.end()
        attempts = [self._attempts[piece.attempt] for piece in pieces]
        for attempt in attempts:
            attempt.running_end = None
        match event:
            case ev.ChunkComputed():
                self._chunk_computed(attempts, pieces, event.results)
            case ev.EngineFailed():
                self._engine_failed(attempts, pieces, event.detail)
            case ev.ChunkAbandoned():
                pass  # all of them have ended
        for attempt in attempts:
            self._pump(attempt)

    def _chunk_computed(
        self,
        attempts: list[Attempt],
        pieces: tuple[Piece, ...],
        results: tuple[SequenceResult, ...],
    ) -> None:
        tokens: dict[Incarnation, list[TokenEmitted]] = {}
        for attempt, piece, result in zip(attempts, pieces, results, strict=True):
            if attempt.phase is Phase.ENDING:
                continue
            attempt.num_computed = piece.end
            attempt.prompt_logprobs += result.prompt_logprobs
            self._admission.publish(attempt)
            if piece.last:
                token = self._first_token(attempt, result)
                tokens.setdefault(attempt.attempt.request.gateway, []).append(token)
        self._actions += [ev.SendTokens(to, tuple(group)) for to, group in tokens.items()]

    def _first_token(self, attempt: Attempt, result: SequenceResult) -> TokenEmitted:
        if result.token_id is None:
            raise InvariantError(f"{attempt.attempt}: the last piece gave no token")
        attempt.token_id = result.token_id
        attempt.phase = Phase.HANDING_OFF
        if attempt.finish(result.token_id) is not None:
            self._stop_serving_decode(attempt, keep=self._own)
            self._reserve_own(attempt)
        self._progressed(attempt)
        self._send_finished(attempt, result.token_id)
        self.totals.count(attempt.stats(self._now_s))
        return attempt.emitted(result, result.token_id, self._now_s)

    def _send_finished(self, attempt: Attempt, token_id: int) -> None:
        decode = attempt.work.decode
        if decode is not None:
            finished = not attempt.needs_decode
            self._actions.append(
                ev.SendPrefillFinished(decode.incarnation, attempt.attempt, token_id, finished)
            )

    def _engine_failed(
        self, attempts: list[Attempt], pieces: tuple[Piece, ...], detail: str
    ) -> None:
        """Fail a request that breaks the engine alone; try each of several by itself."""
        for attempt, piece in zip(attempts, pieces, strict=True):
            if attempt.phase is Phase.ENDING:
                continue
            if len(pieces) > 1:
                self._chunks.repeat_alone(piece)
            else:
                self._fail(attempt, FailureCode.ENGINE_ERROR, detail)

    # --- blocks go out ---

    def _push(self, attempt: Attempt, pool: PoolRef) -> Push:
        push = attempt.pushes.get(pool.incarnation)
        if push is None:
            push = Push(attempt.attempt, pool, self._spec.num_layers)
            attempt.pushes[pool.incarnation] = push
        return push

    def _pump(self, attempt: Attempt) -> None:
        """Start what can be written, or end an attempt that has nothing left to do."""
        if attempt.phase is Phase.ENDING:
            self._settle(attempt)
            return

        def num_ready(index: int) -> int:
            return attempt.num_ready_layers(index, self._spec.num_layers, self._chunks.layers_done)

        for push in attempt.pushes.values():
            operation = push.next_operation(num_ready, attempt.block_ids)
            if operation is not None:
                self._actions.append(operation)
        if handed_off(attempt):
            self._end(attempt, tell_decode=False)

    def _apply_push(
        self, event: ev.WritesBegun | ev.SlicesWritten | ev.BlocksCommitted | ev.WritesFailed
    ) -> None:
        attempt = self._get(event.attempt)
        push = attempt.pushes[event.pool]
        match event:
            case ev.WritesBegun():
                push.begun(event.accepted)
            case ev.SlicesWritten():
                push.written()
            case ev.BlocksCommitted():
                push.committed()
            case ev.WritesFailed():
                push.failed()
        if not isinstance(event, ev.WritesFailed):
            self._progressed(attempt)
        if push.closed:
            self._close(push)
        self._pump(attempt)

    def _close(self, push: Push) -> None:
        end = push.close()
        if end is not None:
            self._actions.append(end)

    def _stop_serving_decode(self, attempt: Attempt, keep: PoolRef | None = None) -> None:
        """Write only what is for our own node from now on.

        A push to `keep` goes on: the slots that the decode worker lets go of are refused there,
        and those that we reserve instead are written by the same push.
        """
        attempt.needs_decode = False
        kept = {attempt.own_pool, keep.incarnation if keep is not None else None}
        for pool, push in attempt.pushes.items():
            if pool not in kept:
                self._close(push)

    def _progressed(self, attempt: Attempt) -> None:
        if attempt.phase is Phase.HANDING_OFF:
            attempt.deadline_s = self._now_s + self._config.handoff_timeout_s

    # --- ends ---

    def _apply_peer(
        self, event: ev.Released | ev.Cancelled | ev.GatewayLost | ev.DecodeLost
    ) -> None:
        live = [a for a in self._attempts.values() if a.phase is not Phase.ENDING]
        match event:
            case ev.Released():
                for attempt in live:
                    decode = attempt.work.decode
                    ours = decode is not None and decode.incarnation == event.decode
                    if ours and attempt.attempt == event.attempt:
                        self._stop_serving_decode(attempt)
                        self._pump(attempt)
            case ev.Cancelled():
                self._end_older(event.attempt)
                self._refuse_slots(self._early.take_attempt(event.attempt))
            case ev.GatewayLost():
                for attempt in live:
                    if attempt.attempt.request.gateway == event.gateway:
                        self._end(attempt, tell_decode=True)
                self._refuse_slots(
                    self._early.take(lambda e: e.attempt.request.gateway == event.gateway)
                )
            case ev.DecodeLost():
                for attempt in live:
                    decode = attempt.work.decode
                    if attempt.needs_decode and decode and decode.incarnation == event.decode:
                        self._fail(attempt, FailureCode.PEER_LOST, f"decode worker {decode.name}")
                self._early.take(lambda e: e.decode == event.decode)

    def _time_out(self) -> None:
        self._refuse_slots(self._early.expire(self._now_s))
        for attempt in list(self._attempts.values()):
            late = attempt.deadline_s is not None and attempt.deadline_s <= self._now_s
            if late and attempt.needs_decode and attempt.phase is Phase.HANDING_OFF:
                self._fail(attempt, FailureCode.TIMED_OUT, "the decode worker did not take over")
                continue
            for push in attempt.pushes.values():
                push.resume()
            self._pump(attempt)

    def _end_older(self, name: AttemptId) -> None:
        """Remember `name` as seen, and end it and every older attempt of its request."""
        self._seen.add(name)
        for attempt in list(self._attempts.values()):
            mine = attempt.attempt
            if mine.request == name.request and mine.attempt <= name.attempt:
                self._end(attempt, tell_decode=True)

    def _fail(self, attempt: Attempt, code: FailureCode, detail: str) -> None:
        self.totals.num_failed += 1
        self._actions.append(ev.SendFailure(attempt.attempt, code, detail))
        self._end(attempt, tell_decode=code is not FailureCode.PEER_LOST)

    def _end(self, attempt: Attempt, *, tell_decode: bool) -> None:
        if attempt.phase is Phase.ENDING:
            return
        self._admission.leave(attempt)
        decode = attempt.work.decode
        if tell_decode and attempt.needs_decode and decode is not None:
            self._actions.append(ev.SendPrefillGone(decode.incarnation, attempt.attempt))
        attempt.phase = Phase.ENDING
        self._chunks.remove(attempt.attempt)
        if attempt.running_end is not None and all(
            self._attempts[piece.attempt].phase is Phase.ENDING for piece in self._chunks.running
        ):
            self._actions.append(ev.AbandonChunk())
        for push in attempt.pushes.values():
            self._close(push)
        self._settle(attempt)

    def _settle(self, attempt: Attempt) -> None:
        """Give everything back, once nothing touches it."""
        if attempt.touched or self._attempts.get(attempt.attempt) is not attempt:
            return
        del self._attempts[attempt.attempt]
        self._admission.give_back(attempt)
        if attempt.used_pool:
            self._actions.append(ev.CloseTransfer(attempt.attempt))

    def _get(self, name: AttemptId) -> Attempt:
        attempt = self._attempts.get(name)
        if attempt is None:
            raise InvariantError(f"an answer for {name}, which waits for none")
        return attempt

    # --- checking ---

    def validate(self) -> None:
        """Re-derive what must hold between events. Raises `InvariantError`."""
        self._admission.validate(self._attempts.values())
        in_chunk = {piece.attempt for piece in self._chunks.running}
        computing = self._chunks.attempts
        for attempt in self._attempts.values():
            wrong = (
                (attempt.phase is Phase.COMPUTING and attempt.attempt not in computing)
                or (attempt.running_end is not None) != (attempt.attempt in in_chunk)
                or attempt.num_cached_tokens > attempt.num_tokens - 1
                or not attempt.num_cached_tokens <= attempt.num_computed <= attempt.num_tokens
                or (attempt.phase is Phase.ENDING and not attempt.touched)
                or handed_off(attempt)
            )
            if wrong:
                raise InvariantError(f"the attempt's record contradicts itself: {attempt}")
