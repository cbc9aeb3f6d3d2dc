"""The prefill worker: everything that `prefill.state` decides is done here.

One asyncio loop owns the state machine, the connections and the pool; one thread runs the engine.
The engine's thread announces each layer to the loop, which sends that layer's slices away while
the engine computes the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

from core.config import PrefillConfig
from core.errors import ConnectionLost, HalfmoonError, WireError
from core.hashing import split_hashes, unpack_token_ids
from core.ids import Address, AttemptId, Incarnation, PoolRef, WorkerRef
from core.latency import LatencyProfile
from core.links import ConductorLink
from core.messages import to_decode, to_gateway
from core.messages.to_conductor import RegisterWorker, WorkerCapacity, WorkerReport, WorkerRole
from core.messages.to_decode import PrefillFinished, PrefillGone
from core.messages.to_gateway import AttemptFailed, TokenFrame
from core.messages.to_prefill import CancelPrefill, DecodeSlots, PrefillRequest, ReleasePrefill
from core.net import HEARTBEAT_S, BaseHandler, Connection, Identity, Listener, listen
from core.wire import Message, MessageSet
from engine.base import Engine, StepAbandoned
from prefill import events as ev
from prefill.pool_link import PoolLink
from prefill.state import PrefillState

log = logging.getLogger(__name__)

FROM_GATEWAY = MessageSet(PrefillRequest, CancelPrefill)
FROM_DECODE = MessageSet(DecodeSlots, ReleasePrefill)

_STOP_TIMEOUT_S = 10.0


class PrefillWorker:
    """One life of a prefill worker. `engine` stays the caller's to close, after `stop`.

    `failed` ends with an exception when the worker finds its own bookkeeping broken; it serves
    nobody from then on and must be replaced.
    """

    def __init__(
        self,
        config: PrefillConfig,
        engine: Engine,
        *,
        identity: Identity,
        secret: bytes,
        listen: Address,
        pool_socket: Path,
        resolve_conductor: Callable[[], Awaitable[Address]],
        profile: LatencyProfile | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._config, self._engine = config, engine
        self._identity, self._secret = identity, secret
        self._listen_at = listen
        self._heartbeat_s = heartbeat_s
        self._profile = profile
        self._state = PrefillState(config, engine.spec, engine.num_blocks)
        self._pool = PoolLink(
            config,
            engine,
            identity=identity,
            secret=secret,
            socket_path=pool_socket,
            on_change=self._pool_changed,
            heartbeat_s=heartbeat_s,
        )
        self._conductor = ConductorLink(
            resolve_conductor,
            identity=identity,
            secret=secret,
            register=self._registration,
            heartbeat_s=heartbeat_s,
        )
        self._peers: dict[Incarnation, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asks: dict[AttemptId, list[asyncio.Task[None]]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="prefill-engine")
        self._pool_ref: PoolRef | None = None
        self._pool_moved = asyncio.Event()
        self._step_started_s: float | None = None
        self._abandoned = False

    async def start(self) -> None:
        """Listen, look for the pool node once, register. Raises `OSError` if it cannot listen."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._listener: Listener = await listen(
            self._listen_at,
            _Handler(self),
            identity=self._identity,
            secret=self._secret,
            sets=_message_sets,
            heartbeat_s=self._heartbeat_s,
        )
        await self._pool.connect()
        self._pool_moved.clear()  # the first registration tells of this one
        self._loops = [
            self._loop.create_task(work())
            for work in (self._pool.run, self._conductor.run, self._announce_pool, self._beat)
        ]
        for task in self._loops:
            task.add_done_callback(self._done)

    @property
    def ref(self) -> WorkerRef:
        """Who and where this worker is.

        A host that never had a pool node is registered under a node named by the worker's own
        incarnation, which no source and no slot can name.
        """
        address = self._listener.endpoint
        assert isinstance(address, Address)
        pool = self._pool_ref or PoolRef(
            f"{self._identity.name}-has-none", self._identity.incarnation, address
        )
        return WorkerRef(self._identity.name, self._identity.incarnation, address, pool)

    def drain(self) -> None:
        """Take no new requests. What is here is finished."""
        self._dispatch(ev.DrainStarted())

    @property
    def idle(self) -> bool:
        """Whether nothing is held for anybody and nothing runs."""
        return self._state.idle and not self._tasks

    async def stop(self) -> None:
        """End everything, the running step included."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._listener.close()
        await self._pool.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._engine_thread.shutdown()
        self.failed.cancel()

    def stats(self) -> dict[str, float]:
        """Gauges of the moment, and counters (`_total`) since the start.

        `step_running_seconds` is how long the engine has been at its present step.
        """
        since_s = self._step_started_s
        load, totals, traffic = self._state.load, self._state.totals, self._pool.traffic
        num_blocks = self._engine.num_blocks
        return {
            "requests_running": load.num_running,
            "requests_waiting": load.num_waiting,
            "kv_cache_usage": (num_blocks - load.free_blocks) / num_blocks,
            "step_running_seconds": 0.0 if since_s is None else self._loop.time() - since_s,
            "prompt_tokens_computed_total": totals.computed_tokens,
            "prompt_tokens_cached_local_total": totals.cached_local_tokens,
            "prompt_tokens_cached_pool_total": totals.cached_pool_tokens,
            "first_tokens_total": totals.num_first_tokens,
            "failed_attempts_total": totals.num_failed,
            "queue_seconds_total": totals.queue_s,
            "prefill_seconds_total": totals.prefill_s,
            "loaded_bytes_total": traffic.loaded_bytes,
            "written_local_bytes_total": traffic.written_local_bytes,
            "written_remote_bytes_total": traffic.written_remote_bytes,
            "corrupt_blocks_total": traffic.num_corrupt_blocks,
        }

    # --- the state machine ---

    def _dispatch(self, event: ev.Event) -> None:
        if self.failed.done():
            return
        try:
            for action in self._state.handle(event, self._loop.time()):
                self._perform(action)
        except Exception as error:
            log.exception("%s cannot go on after %s", self._identity.name, type(event).__name__)
            self.failed.set_exception(error)
            for conn in self._listener.connections:
                conn.close("the worker failed")

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.RunChunk():
                self._abandoned = False
                self._spawn(self._run_chunk(action))
            case ev.AbandonChunk():
                self._abandoned = True
            case ev.ZeroBlock():
                self._engine.zero_block(action.block_id)
            case ev.EndWrites():
                self._pool.end_writes(action)
            case ev.CloseTransfer():
                self._pool.close_transfer(action.attempt)
                for ask in self._asks.pop(action.attempt, ()):
                    ask.cancel()
            case ev.SendTokens():
                self._post(action.gateway, TokenFrame(action.tokens))
            case ev.SendFailure():
                failed = AttemptFailed(action.attempt, action.code, action.detail)
                self._post(action.attempt.request.gateway, failed)
            case ev.SendPrefillFinished():
                finished = PrefillFinished(action.attempt, action.token_id, action.finished)
                self._post(action.decode, finished)
            case ev.SendPrefillGone():
                self._post(action.decode, PrefillGone(action.attempt))
            case ev.LeasePrefix() | ev.FetchPrefix() | ev.ReserveOwnSlots():
                # These touch none of our blocks, so the end of the attempt ends them too.
                task = self._spawn(self._answer(action))
                self._asks.setdefault(action.attempt, []).append(task)
            case ev.LoadBlocks() | ev.BeginWrites() | ev.WriteBlocks() | ev.CommitBlocks():
                self._spawn(self._answer(action))
            case _:
                assert_never(action)

    async def _answer(self, action: ev.PoolAction) -> None:
        self._dispatch(await self._pool.perform(action))

    async def _run_chunk(self, action: ev.RunChunk) -> None:
        def layer_done(layer: int) -> None:
            if self._abandoned:
                raise StepAbandoned
            self._loop.call_soon_threadsafe(self._dispatch, ev.LayerComputed(layer))

        event: ev.Event
        self._step_started_s = self._loop.time()
        try:
            results = await self._loop.run_in_executor(
                self._engine_thread, self._engine.step, action.steps, layer_done
            )
            event = ev.ChunkComputed(tuple(results))
        except StepAbandoned:
            event = ev.ChunkAbandoned()
        except Exception as error:  # (whatever the model raises is the request's failure, not ours)
            log.exception("the engine failed")
            event = ev.EngineFailed(f"{type(error).__name__}: {error}")
        self._step_started_s = None
        self._dispatch(event)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            log.error("an operation ended without an answer", exc_info=task.exception())
            self.failed.set_exception(task.exception() or InterruptedError())

    # --- peers ---

    def _post(self, peer: Incarnation, message: Message) -> None:
        conn = self._peers.get(peer)
        if conn is not None:
            with contextlib.suppress(ConnectionLost):  # `on_closed` tells the state machine
                conn.post(message)

    def received(self, conn: Connection, message: Message) -> None:
        """Take a message; a gateway speaks for its own requests only. Raises `WireError`."""
        if isinstance(message, PrefillRequest | CancelPrefill):
            gateway = conn.peer.incarnation
            if message.attempt.request.gateway != gateway:
                raise WireError(f"{message.attempt} is not a request of {gateway}")
        known = self._peers.get(conn.peer.incarnation)
        if known is not conn:
            if known is not None:
                self.closed(known)  # it gave that connection up before we noticed
                known.close("replaced by a newer connection")
            self._peers[conn.peer.incarnation] = conn
        match message:
            case PrefillRequest():
                self._dispatch(ev.RequestReceived(_unpack(message, self._engine.spec.block_size)))
            case CancelPrefill():
                self._dispatch(ev.Cancelled(message.attempt))
            case DecodeSlots():
                self._dispatch(
                    ev.DecodeSlotsReceived(
                        message.attempt, conn.peer.incarnation, message.pool, message.slots
                    )
                )
            case ReleasePrefill():
                self._dispatch(ev.Released(message.attempt, conn.peer.incarnation))
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def closed(self, conn: Connection) -> None:
        """Take the end of a connection; only the newest one of a peer counts."""
        peer = conn.peer
        if self._peers.get(peer.incarnation) is conn:
            del self._peers[peer.incarnation]
            lost = ev.GatewayLost if peer.kind == "gateway" else ev.DecodeLost
            self._dispatch(lost(peer.incarnation))

    # --- pool node and Conductor ---

    def _pool_changed(self, pool: PoolRef | None) -> None:
        if pool is None:
            self._dispatch(ev.PoolLost())
            return
        self._pool_ref = pool
        self._pool_moved.set()
        self._dispatch(ev.PoolConnected(pool))

    async def _announce_pool(self) -> None:
        """Register again whenever the host's pool node is another one than registered."""
        while True:
            await self._pool_moved.wait()
            self._pool_moved.clear()
            try:
                await self._conductor.request(self._registration(), timeout_s=5)
            except (HalfmoonError, TimeoutError) as error:
                log.info("%s: cannot register its pool node yet: %r", self._identity.name, error)
                self._pool_moved.set()
                await asyncio.sleep(self._config.report_interval_s)

    def _registration(self) -> RegisterWorker:
        spec = self._engine.spec
        capacity = WorkerCapacity(
            num_blocks=self._engine.num_blocks,
            block_size=spec.block_size,
            max_batch=self._config.max_chunk_requests,
            max_chunk_tokens=self._config.max_chunk_tokens,
        )
        return RegisterWorker(
            WorkerRole.PREFILL, self.ref, capacity, self._state.attempts, self._profile
        )

    async def _beat(self) -> None:
        while True:
            self._dispatch(ev.TimedOut())
            report = WorkerReport(
                self._state.load, None, self._state.draining, self._pool.transfers.totals()
            )
            self._conductor.post(report)
            await asyncio.sleep(self._config.report_interval_s)


class _Handler(BaseHandler):
    """Hands everything to the worker."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        self._worker.received(conn, message)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._worker.closed(conn)


def _message_sets(kind: str) -> tuple[MessageSet, MessageSet]:
    match kind:
        case "gateway":
            return FROM_GATEWAY, to_gateway.MESSAGES
        case "decode":
            return FROM_DECODE, to_decode.MESSAGES
        case _:
            raise WireError(f"a prefill worker does not serve a {kind}")


def _unpack(message: PrefillRequest, block_size: int) -> ev.PrefillWork:
    """Raises `WireError` when the fields contradict one another."""
    try:
        token_ids = unpack_token_ids(message.token_ids)
        block_hashes = tuple(split_hashes(message.block_hashes))
    except ValueError as error:
        raise WireError(str(error)) from error
    if len(block_hashes) != len(token_ids) // block_size:
        raise WireError(f"{len(block_hashes)} block hashes for {len(token_ids)} tokens")
    if not 0 <= message.num_output_tokens <= len(token_ids):
        raise WireError(f"{message.num_output_tokens} of {len(token_ids)} tokens are output")
    return ev.PrefillWork(
        attempt=message.attempt,
        token_ids=token_ids,
        num_output_tokens=message.num_output_tokens,
        block_hashes=block_hashes,
        num_reusable_blocks=message.num_reusable_blocks,
        params=message.params,
        sources=message.sources,
        decode=message.decode,
        priority=message.priority,
    )
