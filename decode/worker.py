"""The decode worker's shell: connections, the engine's thread, copies. It decides nothing.

The numbered life of a request is in `decode.state`. Threads: the loop owns all state; the engine's
thread runs steps; the copier's thread moves blocks between the pool's shared memory and the paged
cache, so that the running batch goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_never

from core.batching import ChunkBatcher
from core.config import DecodeConfig
from core.errors import ConnectionLost, HalfmoonError, InvariantError, WireError
from core.ids import Address, Incarnation, WorkerRef
from core.latency import LatencyProfile
from core.links import ConductorLink, Peers
from core.messages import to_gateway, to_prefill
from core.messages.to_conductor import RegisterWorker, WorkerCapacity, WorkerRole
from core.messages.to_decode import CancelDecode, DecodeRequest, PrefillFinished, PrefillGone
from core.messages.to_gateway import AttemptFailed, TokenFrame
from core.messages.to_prefill import DecodeSlots, ReleasePrefill
from core.net import HEARTBEAT_S, BaseHandler, Connection, Identity, Listener, listen
from core.wire import Message, MessageSet
from decode import events as ev
from decode.pool_link import PoolLink
from decode.state import DecodeState
from engine.base import Engine, StepAbandoned

log = logging.getLogger(__name__)

TICK_S = 0.1
POOL_START_TIMEOUT_S = 30.0
REGISTER_TIMEOUT_S = 5.0
_STEP_S_WEIGHT = 0.1


class DecodeWorker:
    """One decode worker. With `coupled`, a prefill batcher, it also computes prompts.

    `engine` stays the caller's to close, after `stop`. `resolve_conductor` tells where the
    Conductor is now. `failed` ends with an exception when the worker finds its own bookkeeping
    broken: it serves nobody from then on and must be replaced.
    """

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        *,
        identity: Identity,
        secret: bytes,
        listen: Address,
        pool_socket: Path,
        resolve_conductor: Callable[[], Awaitable[Address]],
        coupled: ChunkBatcher | None = None,
        profile: LatencyProfile | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.state = DecodeState(config, engine.spec, engine.num_blocks, coupled)
        self._config = config
        self._profile = profile
        self._engine = engine
        self._role = WorkerRole.DECODE if coupled is None else WorkerRole.COUPLED
        self._identity, self._secret = identity, secret
        self._heartbeat_s = heartbeat_s
        self._address = listen
        self._listener: Listener | None = None
        self._gateways: dict[Incarnation, Connection] = {}
        self._engine_thread = ThreadPoolExecutor(1, f"{identity.name}-engine")
        self._copier = ThreadPoolExecutor(1, f"{identity.name}-copier")
        self._pool = PoolLink(
            pool_socket,
            engine,
            self._copier,
            self._handle,
            identity=identity,
            secret=secret,
            progress_timeout_s=config.load_timeout_s,
            heartbeat_s=heartbeat_s,
        )
        self._prefills = Peers(
            _PrefillAnswers(self._handle),
            identity=identity,
            secret=secret,
            sends=to_prefill.MESSAGES,
            receives=MessageSet(PrefillFinished, PrefillGone),
            heartbeat_s=heartbeat_s,
        )
        self._conductor = ConductorLink(
            resolve_conductor,
            identity=identity,
            secret=secret,
            register=self._registration,
            heartbeat_s=heartbeat_s,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._step_since_s: float | None = None
        self._abandoned = False
        self._num_steps = 0
        self._step_seconds = 0.0
        self._mean_step_s = 0.0

    # --- life ---

    async def start(self) -> None:
        """Connect to the pool node, listen, register. Raises when the pool node does not come."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._pool.connect(POOL_START_TIMEOUT_S)
        self._listener = await listen(
            self._address,
            _Gateways(self),
            identity=self._identity,
            secret=self._secret,
            sets=_message_sets,
            heartbeat_s=self._heartbeat_s,
        )
        assert isinstance(self._listener.endpoint, Address)
        self._address = self._listener.endpoint
        for work in (self._pool.stay_connected, self._conductor.run, self._tick, self._report):
            self._spawn(work())

    async def stop(self) -> None:
        """End everything, the step under way included; gateways see their connections close."""
        self._stopping = True
        if self._listener is not None:
            await self._listener.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._prefills.close()
        await self._pool.close()
        # A step or copy under way still uses the engine's memory.
        for thread in (self._engine_thread, self._copier):
            await asyncio.to_thread(thread.shutdown)
        self.failed.cancel()

    def drain(self) -> None:
        """Take no new requests. What is here is finished."""
        self._handle(ev.DrainStarted())

    @property
    def ref(self) -> WorkerRef:
        """This life of the worker, with the pool node of the moment."""
        identity = self._identity
        return WorkerRef(identity.name, identity.incarnation, self._address, self._pool.client.ref)

    def stats(self) -> dict[str, float]:
        """Return gauges and counters for `/metrics`.

        `step_running_seconds` is how long the engine has been at its present step.
        """
        since_s = self._step_since_s
        return {
            **self.state.counters(),
            "step_running_seconds": 0.0 if since_s is None else time.monotonic() - since_s,
            "load_seconds_total": self._pool.load_seconds,
            "step_seconds_total": self._step_seconds,
            "steps_total": self._num_steps,
            "step_seconds_mean": self._mean_step_s,
        }

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Serve nobody any more: our own bookkeeping cannot be trusted."""
        log.critical("%s: the worker is broken", self._identity.name, exc_info=error)
        self._stopping = True
        for conn in self._gateways.values():
            conn.close("the worker is broken")
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(ev.TimePassed())

    # --- the Conductor ---

    def _registration(self) -> RegisterWorker:
        spec = self._engine.spec
        capacity = WorkerCapacity(
            num_blocks=self._engine.num_blocks,
            block_size=spec.block_size,
            max_batch=self._config.max_batch,
            max_chunk_tokens=self._config.max_chunk_tokens,
        )
        return RegisterWorker(self._role, self.ref, capacity, self.state.attempts(), self._profile)

    async def _register_again(self) -> None:
        """Tell the Conductor of a new pool node; a new connection to it tells by itself."""
        try:
            await self._conductor.request(self._registration(), timeout_s=REGISTER_TIMEOUT_S)
        except (HalfmoonError, TimeoutError) as error:
            log.warning("%s: not registered anew: %s", self._identity.name, error)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            self._conductor.post(
                self.state.report(self._mean_step_s, self._pool.transfers.totals())
            )

    # --- gateways ---

    def take_from_gateway(self, conn: Connection, message: Message) -> None:
        """Take a message; a gateway speaks for its own requests only. Raises `WireError`."""
        if not isinstance(message, DecodeRequest | CancelDecode):
            raise WireError(f"unexpected {type(message).__name__} from a gateway")
        gateway = conn.peer.incarnation
        if message.attempt.request.gateway != gateway:
            raise WireError(f"{message.attempt} is not a request of {gateway}")
        known = self._gateways.get(gateway)
        if known is not conn:
            if known is not None:
                self._handle(ev.GatewayLost(gateway))
            self._gateways[gateway] = conn
        if isinstance(message, DecodeRequest):
            self._handle(ev.RequestReceived(message))
        else:
            self._handle(ev.Cancelled(message.attempt))

    def lose_gateway(self, conn: Connection) -> None:
        """Forget a connection; its requests end unless the gateway has a newer one."""
        if self._gateways.get(conn.peer.incarnation) is conn:
            del self._gateways[conn.peer.incarnation]
            self._handle(ev.GatewayLost(conn.peer.incarnation))

    def _send_to_gateway(self, gateway: Incarnation, message: Message) -> None:
        conn = self._gateways.get(gateway)
        if conn is None or conn.closed:
            return  # `GatewayLost` follows or has come already
        try:
            conn.post(message)
        except ConnectionLost as error:
            log.info("%s: gateway lost: %s", self._identity.name, error)

    # --- events and actions ---

    def _handle(self, event: ev.Event) -> None:
        if self._stopping:
            return
        try:
            actions = self.state.handle(event, time.monotonic())
        except InvariantError as error:
            self._give_up(error)
            return
        for action in actions:
            self._execute(action)
        if isinstance(event, ev.PoolConnected) and self._conductor.connected:
            self._spawn(self._register_again())

    def _execute(self, action: ev.Action) -> None:
        match action:
            case ev.ReserveSlots():
                self._spawn(self._post_outcome(self._pool.reserve(action)))
            case ev.FetchPrefix():
                self._spawn(self._post_outcome(self._pool.fetch(action)))
            case ev.LoadBlocks():
                self._spawn(self._post_outcome(self._pool.load(action)))
            case ev.PublishBlocks():
                self._spawn(self._post_outcome(self._pool.publish(action)))
            case ev.RunStep():
                self._abandoned = False
                self._spawn(self._post_outcome(self._run_step(action)))
            case ev.AbandonStep():
                self._abandoned = True
            case ev.SendDecodeSlots(attempt=attempt, prefill=prefill, slots=slots):
                slots_message = DecodeSlots(attempt, self._pool.client.ref, slots)
                self._spawn(self._send_to_prefill(prefill, slots_message))
            case ev.SendRelease(attempt=attempt, prefill=prefill):
                self._spawn(self._send_to_prefill(prefill, ReleasePrefill(attempt)))
            case ev.SendTokens(gateway=gateway, tokens=tokens):
                self._send_to_gateway(gateway, TokenFrame(tokens))
            case ev.SendFailure(attempt=attempt, code=code, detail=detail):
                failure = AttemptFailed(attempt, code, detail)
                self._send_to_gateway(attempt.request.gateway, failure)
            case ev.ReportCorrupt(handle=handle):
                log.warning("%s: corrupt block in %s", self._identity.name, handle)
                self._pool.report_corrupt(handle)
            case ev.CloseTransfer(attempt=attempt):
                self._pool.close_transfer(attempt)
            case _:
                assert_never(action)

    async def _post_outcome(self, work: Awaitable[ev.Event]) -> None:
        self._handle(await work)

    async def _run_step(self, action: ev.RunStep) -> ev.Event:
        def layer_done(layer: int) -> None:
            if self._abandoned:
                raise StepAbandoned

        started_s = self._step_since_s = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(
                self._engine_thread, self._engine.step, action.sequences, layer_done
            )
        except StepAbandoned:
            return ev.StepAbandoned()
        except Exception as error:  # (whatever an engine raises costs this step, not the worker)
            log.exception("%s: the engine failed", self._identity.name)
            return ev.EngineFailed(f"{type(error).__name__}: {error}")
        finally:
            self._step_since_s = None
        step_s = time.monotonic() - started_s
        self._num_steps += 1
        self._step_seconds += step_s
        weight = _STEP_S_WEIGHT if self._num_steps > 1 else 1.0
        self._mean_step_s += weight * (step_s - self._mean_step_s)
        return ev.StepComputed(tuple(results))

    async def _send_to_prefill(self, prefill: WorkerRef, message: Message) -> None:
        try:
            conn = await self._prefills.get(prefill.address, prefill.incarnation)
            conn.post(message)
        except HalfmoonError as error:
            log.info("%s: prefill worker %s: %s", self._identity.name, prefill.name, error)
            self._handle(ev.PrefillLost(prefill.incarnation))


def _message_sets(kind: str) -> tuple[MessageSet, MessageSet]:
    if kind != "gateway":
        raise WireError(f"a decode worker is not dialled by {kind}")
    return MessageSet(DecodeRequest, CancelDecode), to_gateway.MESSAGES


class _Gateways(BaseHandler):
    """Connections that gateways opened."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        self._worker.take_from_gateway(conn, message)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._worker.lose_gateway(conn)


class _PrefillAnswers(BaseHandler):
    """Connections that this worker opened to prefill workers."""

    def __init__(self, handle: Callable[[ev.Event], None]) -> None:
        self._handle = handle

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        match message:
            case PrefillFinished():
                self._handle(ev.FirstTokenReceived(conn.peer.incarnation, message))
            case PrefillGone(attempt=attempt):
                self._handle(ev.PrefillGone(conn.peer.incarnation, attempt))
            case _:
                super().on_message(conn, message, payload)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._handle(ev.PrefillLost(conn.peer.incarnation))
