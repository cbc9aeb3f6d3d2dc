"""The edge of the request machines: connections to the Conductor and the workers, and timers.

Every machine's events come through `Dispatcher`, and it does what they decide. All in one loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from cluster.gateway.errors import shutting_down
from cluster.gateway.metrics import Metrics
from cluster.request_events import (
    Action,
    AskPlacement,
    AttemptGivenBack,
    ClientGone,
    ConductorLost,
    EndRequest,
    Event,
    MachineFailed,
    OutputText,
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
    TimerFired,
    TokenReceived,
    WorkerLost,
)
from cluster.requests import RequestMachine
from core.errors import HalfmoonError, InvariantError, WireError
from core.ids import Address, Incarnation, RequestId, WorkerRef
from core.links import ConductorLink, Peers
from core.messages import to_decode, to_gateway, to_prefill
from core.messages.to_conductor import (
    AttemptEnded,
    ClusterState,
    GetClusterState,
    Placement,
    PlaceRequest,
    RegisterGateway,
    Rejection,
)
from core.messages.to_decode import CancelDecode, DecodeRequest
from core.messages.to_gateway import AttemptFailed, FailureCode, TokenFrame
from core.messages.to_prefill import CancelPrefill, PrefillRequest
from core.net import HEARTBEAT_S, BaseHandler, Connection, Identity
from core.wire import Message

log = logging.getLogger(__name__)

MAX_REPEATED_ENDS = 1024
"""Ends of attempts that are told again to each Conductor that this gateway registers with."""

Output = StreamToken | EndRequest
SpecFactory = Callable[[RequestId], RequestSpec]


class Generation:
    """The outputs of all choices of one call, in the order they happen.

    `on_overflow` is called once when more than `max_buffered_bytes` wait to be read; the choices
    have been ended by then. `placed` is set once a choice has workers.
    """

    def __init__(self, max_buffered_bytes: int, on_overflow: Callable[[], None]) -> None:
        self.placed = asyncio.Event()
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._max_buffered_bytes = max_buffered_bytes
        self._on_overflow = on_overflow
        self._num_buffered_bytes = 0
        self._live: list[_Live] = []
        self._is_abandoned = False

    async def next(self) -> tuple[int, Output]:
        """Return the next output and the index of its choice. Every choice ends exactly once."""
        index, output = await self._outputs.get()
        self._num_buffered_bytes -= _size(output)
        return index, output

    def next_nowait(self) -> tuple[int, Output] | None:
        """Return the next output if there is one at this moment."""
        if self._outputs.empty():
            return None
        index, output = self._outputs.get_nowait()
        self._num_buffered_bytes -= _size(output)
        return index, output

    def abandon(self) -> None:
        """Nobody reads on: end every choice that has not ended. May be called twice."""
        self._is_abandoned = True
        for live in self._live:
            live.feed(ClientGone(asyncio.get_running_loop().time()))

    def add(self, live: _Live) -> None:
        """Take in a choice."""
        self._live.append(live)

    def put(self, index: int, output: Output) -> None:
        """Add an output of a choice."""
        self._num_buffered_bytes += _size(output)
        self._outputs.put_nowait((index, output))
        if self._num_buffered_bytes > self._max_buffered_bytes and not self._is_abandoned:
            self._is_abandoned = True
            # Not now: the machine that sent this output is still deciding.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.abandon)
            loop.call_soon(self._on_overflow)


def _size(output: Output) -> int:
    """Roughly what an output takes on the wire: its text and the JSON around it."""
    return len(output.text.encode()) + 200


@dataclass(slots=True, eq=False)
class _Live:
    """A request in flight, with what runs on its behalf."""

    machine: RequestMachine
    generation: Generation
    index: int
    started_s: float
    feed: Callable[[Event], None]
    timer: asyncio.TimerHandle | None = None
    sending: dict[Incarnation, asyncio.Task[None]] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float | None = None


class Dispatcher:
    """Runs requests on the cluster."""

    def __init__(
        self,
        *,
        identity: Identity,
        secret: bytes,
        address: Callable[[], Address],
        resolve_conductor: Callable[[], Awaitable[Address]],
        limits: RetryLimits,
        place_timeout_s: float,
        metrics: Metrics,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._identity = identity
        self._limits, self._place_timeout_s = limits, place_timeout_s
        self._metrics = metrics
        self._live: dict[RequestId, _Live] = {}
        self._counter = itertools.count(1)
        self._last_token_s = 0.0
        self._is_stopping = False
        self._ended: deque[AttemptEnded] = deque(maxlen=MAX_REPEATED_ENDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._link = ConductorLink(
            resolve_conductor,
            identity=identity,
            secret=secret,
            register=lambda: RegisterGateway(identity.name, identity.incarnation, address()),
            on_registered=self._repeat_ends,
            heartbeat_s=heartbeat_s,
        )
        handler = _WorkerHandler(self._on_worker_message, self._on_worker_lost)
        self._prefill_peers = Peers(
            handler, identity=identity, secret=secret, sends=to_prefill.MESSAGES,
            receives=to_gateway.MESSAGES, heartbeat_s=heartbeat_s,
        )  # fmt: skip
        self._decode_peers = Peers(
            handler, identity=identity, secret=secret, sends=to_decode.MESSAGES,
            receives=to_gateway.MESSAGES, heartbeat_s=heartbeat_s,
        )  # fmt: skip

    # --- life ---

    def start(self) -> None:
        """Begin to look for the Conductor."""
        self._spawn(self._link.run())

    async def stop(self) -> None:
        """Cancel every request at the workers, close all connections, end all tasks."""
        self._is_stopping = True
        for live in list(self._live.values()):
            self._feed(live, ClientGone(self._now_s()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._prefill_peers.close()
        await self._decode_peers.close()

    @property
    def num_requests(self) -> int:
        """Choices in flight."""
        return len(self._live)

    @property
    def num_tasks(self) -> int:
        """Tasks in flight; 1 (the Conductor link) when nothing is to be done."""
        return len(self._tasks)

    @property
    def connected(self) -> bool:
        """Whether a Conductor knows this gateway."""
        return self._link.connected

    def stalled_s(self) -> float:
        """Seconds without any token while requests are in flight; 0 when none is."""
        if not self._live:
            return 0.0
        oldest_s = min(live.started_s for live in self._live.values())
        return self._now_s() - max(self._last_token_s, oldest_s)

    async def cluster_state(self, timeout_s: float) -> ClusterState:
        """Ask the Conductor. Raises `TimeoutError`, `HalfmoonError`."""
        reply = await self._link.request(GetClusterState(), timeout_s=timeout_s)
        if not isinstance(reply, ClusterState):
            raise WireError(f"expected ClusterState, got {type(reply).__name__}")
        return reply

    def submit(
        self, choices: Sequence[tuple[SpecFactory, OutputText]], generation: Generation
    ) -> None:
        """Start one request per choice; their outputs come through `generation`.

        Raises `ApiError` 503 once `stop` was called.
        """
        if self._is_stopping:
            raise shutting_down(1.0)
        now_s = self._now_s()
        started = []
        for index, (make_spec, text) in enumerate(choices):
            request = RequestId(self._identity.incarnation, next(self._counter))
            machine = RequestMachine(make_spec(request), text, self._limits)
            live = _Live(machine, generation, index, now_s, lambda event: None)
            live.feed = functools.partial(self._feed, live)
            self._live[request] = live
            generation.add(live)
            started.append(live)
        for live in started:
            self._feed(live, Submitted(now_s))

    # --- events ---

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _on_worker_message(self, conn: Connection, message: Message) -> None:
        now_s = self._now_s()
        match message:
            case TokenFrame(tokens):
                self._last_token_s = now_s
                for token in tokens:
                    live = self._live.get(token.attempt.request)
                    if live is not None:
                        self._feed(live, TokenReceived(now_s, token))
            case AttemptFailed(attempt, code, detail):
                live = self._live.get(attempt.request)
                # Of a request that has ended, or of an older attempt, it says nothing new.
                is_news = live is not None and live.machine.attempt == attempt
                level = logging.WARNING if is_news else logging.DEBUG
                log.log(level, "%s gave %s back: %s (%s)", conn.peer.name, attempt, code, detail)
                if code is FailureCode.PREEMPTED:
                    self._metrics.preempted()
                if live is not None:
                    event = AttemptGivenBack(now_s, attempt, code, conn.peer.incarnation)
                    self._feed(live, event)
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _on_worker_lost(self, worker: Incarnation, reason: str) -> None:
        log.warning("lost worker %s: %s", worker, reason)
        now_s = self._now_s()
        for live in list(self._live.values()):
            pending = live.sending.pop(worker, None)
            if pending is not None:
                pending.cancel()
            self._feed(live, WorkerLost(now_s, worker))

    def _feed(self, live: _Live, event: Event) -> None:
        try:
            actions = live.machine.handle(event)
        except InvariantError:
            log.exception("%s: a contradiction; the request ends here", live.machine.attempt)
            actions = live.machine.handle(MachineFailed(self._now_s()))
        for action in actions:
            self._do(live, action)

    # --- actions ---

    def _do(self, live: _Live, action: Action) -> None:
        match action:
            case AskPlacement(message):
                if message.attempt.attempt > 1:
                    self._metrics.migrated()
                self._spawn(self._place(live, message))
            case SendToPrefill(worker, message):
                self._send(live, self._prefill_peers, worker, message)
            case SendToDecode(worker, message):
                self._send(live, self._decode_peers, worker, message)
            case TellConductor(message):
                if isinstance(message, AttemptEnded):
                    self._ended.append(message)
                self._link.post(message)
            case SetTimer(at_s):
                if live.timer is not None:
                    live.timer.cancel()
                loop = asyncio.get_running_loop()
                live.timer = loop.call_at(at_s, self._fire, live)
            case StreamToken():
                self._stream(live, action)
            case EndRequest():
                self._end(live, action)
            case _:
                assert_never(action)

    def _repeat_ends(self) -> None:
        """Tell a Conductor what ended: the first message may have been lost with its last life.

        Workers may have registered these attempts with it before they noticed.
        """
        for message in self._ended:
            self._link.post(message)

    def _fire(self, live: _Live) -> None:
        self._feed(live, TimerFired(self._now_s()))

    async def _place(self, live: _Live, message: PlaceRequest) -> None:
        attempt = message.attempt
        try:
            reply = await self._link.request(message, timeout_s=self._place_timeout_s)
        except (HalfmoonError, TimeoutError) as error:
            log.warning("%s: no placement: %s", attempt, error or type(error).__name__)
            self._feed(live, ConductorLost(self._now_s(), attempt))
            return
        match reply:
            case Placement():
                self._metrics.placed(reply.reason.partition(":")[0])
                live.generation.placed.set()
                self._feed(live, Placed(self._now_s(), attempt, reply))
            case Rejection():
                log.info("%s: rejected: %s", attempt, reply.reason)
                self._feed(live, Rejected(self._now_s(), attempt, reply))
            case _:
                log.error("%s: the Conductor answered %s", attempt, type(reply).__name__)
                self._feed(live, ConductorLost(self._now_s(), attempt))

    def _send(
        self,
        live: _Live,
        peers: Peers,
        worker: WorkerRef,
        message: PrefillRequest | DecodeRequest | CancelPrefill | CancelDecode,
    ) -> None:
        """Send at once where a connection is open; otherwise open one first."""
        pending = live.sending.pop(worker.incarnation, None)
        if pending is not None:  # only a cancel follows, and the request has not been sent yet
            pending.cancel()
            return
        conn = peers.opened(worker.incarnation)
        if conn is not None:
            try:
                conn.post(message)
            except HalfmoonError as error:
                self._call_soon_lost(live, worker, str(error))
            return
        if isinstance(message, CancelPrefill | CancelDecode):
            return  # the connection is gone, and with it the request at the worker
        task = self._spawn(self._dial_and_send(live, peers, worker, message))
        live.sending[worker.incarnation] = task

    def _call_soon_lost(self, live: _Live, worker: WorkerRef, reason: str) -> None:
        # Not now: the machine's remaining actions come first.
        log.warning("cannot send to %s: %s", worker.name, reason)
        event = WorkerLost(self._now_s(), worker.incarnation)
        asyncio.get_running_loop().call_soon(self._feed, live, event)

    async def _dial_and_send(
        self, live: _Live, peers: Peers, worker: WorkerRef, message: Message
    ) -> None:
        try:
            conn = await peers.get(worker.address, worker.incarnation)
            conn.post(message)
        except HalfmoonError as error:
            live.sending.pop(worker.incarnation, None)
            self._call_soon_lost(live, worker, str(error))
            return
        live.sending.pop(worker.incarnation, None)

    def _stream(self, live: _Live, action: StreamToken) -> None:
        now_s = self._now_s()
        if action.token.stats is not None:
            self._metrics.prefilled(action.token.stats, first=action.token.seq == 0)
        if live.last_token_s is None:
            live.first_token_s = now_s
            self._metrics.first_token(now_s - live.started_s)
        else:
            self._metrics.next_token(now_s - live.last_token_s)
        live.last_token_s = now_s
        live.generation.put(live.index, action)

    def _end(self, live: _Live, action: EndRequest) -> None:
        self._live.pop(live.machine.spec.request, None)
        if live.timer is not None:
            live.timer.cancel()
        decode_s = None
        if live.first_token_s is not None and live.last_token_s is not None:
            decode_s = live.last_token_s - live.first_token_s
        e2e_s = self._now_s() - live.started_s
        self._metrics.ended(action, len(live.machine.spec.prompt_token_ids), e2e_s, decode_s)
        live.generation.put(live.index, action)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _WorkerHandler(BaseHandler):
    """Hands what workers send to the dispatcher."""

    def __init__(
        self,
        on_message: Callable[[Connection, Message], None],
        on_lost: Callable[[Incarnation, str], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        self._on_message(conn, message)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._on_lost(conn.peer.incarnation, reason)
