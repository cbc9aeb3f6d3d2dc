"""A real gateway and a real Conductor over real sockets, with workers that pretend to compute.

The pretended model says `forced_token_ids`, then the token `FILLER` for ever. Workers are told
what to do wrong by their `Script`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from cluster.gateway.service import Gateway
from core.config import ConductorConfig, GatewayConfig
from core.hashing import HashRoot, unpack_token_ids
from core.ids import Address, AttemptId, Incarnation, PoolRef, WorkerRef
from core.links import ConductorLink
from core.messages import to_decode, to_gateway, to_prefill
from core.messages.to_conductor import (
    DecodeLoad,
    PrefillLoad,
    RegisterWorker,
    WorkerCapacity,
    WorkerReport,
    WorkerRole,
)
from core.messages.to_decode import CancelDecode, DecodeRequest
from core.messages.to_gateway import (
    AttemptFailed,
    FailureCode,
    PrefillStats,
    TokenEmitted,
    TokenFrame,
)
from core.messages.to_prefill import CancelPrefill, PrefillRequest
from core.net import BaseHandler, Connection, Identity, Listener, listen
from core.requests import PositionLogprobs, SamplingParams, TokenLogprob, finish_reason
from scheduler.service import ConductorService
from tests.gateway.tiny_tokenizer import EOS, tiny_tokenizer

SECRET = b"g" * 32
LOCAL = Address("127.0.0.1", 0)
MODEL = "tiny"
BLOCK = 4
TOKENIZER = tiny_tokenizer()
EOS_ID = TOKENIZER.encode(EOS, add_special_tokens=False)[0]
FILLER = TOKENIZER.encode("z", add_special_tokens=False)[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


@dataclass
class Script:
    """What a worker does instead of its duty; consumed one entry per request."""

    failures: deque[FailureCode] = field(default_factory=deque)
    pause_at: int | None = None  # stop before output number `pause_at` until `go` is set
    go: asyncio.Event = field(default_factory=asyncio.Event)
    duplicate: bool = False
    cached_tokens: int = 0


class FakeWorker(BaseHandler):
    """A prefill, decode or coupled worker."""

    def __init__(self, role: WorkerRole, name: str, conductor: Callable[[], Address]) -> None:
        self.role = role
        self.script = Script()
        self.requests: list[PrefillRequest | DecodeRequest] = []
        self.cancelled: list[AttemptId] = []
        self.arrived = asyncio.Event()
        self.was_cancelled = asyncio.Event()
        self.running: dict[AttemptId, asyncio.Task[None]] = {}
        kind = "prefill" if role is WorkerRole.PREFILL else "decode"
        self.identity = Identity(kind, name, incarnation())
        self._conductor = conductor
        self._listener: Listener | None = None
        self._link: ConductorLink | None = None
        self._linking: asyncio.Task[None] | None = None
        self.ref: WorkerRef | None = None

    async def start(self) -> None:
        sets = {
            "prefill": to_prefill.MESSAGES,
            "decode": to_decode.MESSAGES,
        }[self.identity.kind]
        self._listener = await listen(
            LOCAL, self, identity=self.identity, secret=SECRET,
            sets=lambda kind: (sets, to_gateway.MESSAGES),
        )  # fmt: skip
        address = self._listener.endpoint
        assert isinstance(address, Address)
        pool = PoolRef("pool-" + self.identity.name, incarnation(), address)
        self.ref = WorkerRef(self.identity.name, self.identity.incarnation, address, pool)
        capacity = WorkerCapacity(num_blocks=10_000, block_size=BLOCK, max_batch=64,
                                  max_chunk_tokens=512)  # fmt: skip
        register = RegisterWorker(self.role, self.ref, capacity, (), None)
        registered = asyncio.Event()

        async def resolve() -> Address:
            return self._conductor()

        def report() -> None:
            assert self._link is not None
            self._link.post(_idle_report(self.role))
            registered.set()

        self._link = ConductorLink(
            resolve, identity=self.identity, secret=SECRET, on_registered=report,
            register=lambda: dataclasses.replace(register, attempts=self.attempts()),
        )  # fmt: skip
        self._linking = asyncio.create_task(self._link.run())
        async with asyncio.timeout(5):
            await registered.wait()

    def attempts(self) -> tuple[AttemptId, ...]:
        """Ended ones too, as of a worker that has not noticed any end yet."""
        return tuple(request.attempt for request in self.requests)

    async def kill(self) -> None:
        """Die as by SIGKILL: every connection breaks."""
        tasks = [t for t in (self._linking, *self.running.values()) if t is not None]
        for task in tasks:
            task.cancel()
        assert self._listener is not None
        await self._listener.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_message(self, conn: Connection, message: object, payload: bytes | None) -> None:
        match message:
            case PrefillRequest(attempt=attempt) | DecodeRequest(attempt=attempt):
                self.requests.append(message)
                self.arrived.set()
                if self.script.failures:
                    conn.post(AttemptFailed(attempt, self.script.failures.popleft(), "scripted"))
                    return
                self.running[attempt] = asyncio.create_task(self._run(conn, message))
            case CancelPrefill(attempt) | CancelDecode(attempt):
                self.cancelled.append(attempt)
                self.was_cancelled.set()
                task = self.running.pop(attempt, None)
                if task is not None:
                    task.cancel()

    async def _run(self, conn: Connection, request: PrefillRequest | DecodeRequest) -> None:
        params, base = request.params, request.num_output_tokens
        computes_first = isinstance(request, PrefillRequest) or request.prefill is None
        goes_on = isinstance(request, DecodeRequest)
        seq = base
        while True:
            token_id = say(params, seq)
            finish = finish_reason(params, seq + 1, token_id)
            if seq > base or computes_first:
                if self.script.pause_at is not None and seq >= self.script.pause_at:
                    await self.script.go.wait()
                stats = self._stats(request) if seq == base else None
                prompt = _prompt_logprobs(request) if seq == base else ()
                token = TokenEmitted(
                    request.attempt, seq, token_id, _logprobs(params, token_id), finish, stats,
                    prompt,
                )  # fmt: skip
                frames = [TokenFrame((token,))] * (2 if self.script.duplicate else 1)
                for frame in frames:
                    conn.post(frame)
                await asyncio.sleep(0)
            if finish is not None or not goes_on:
                return
            seq += 1

    def _stats(self, request: PrefillRequest | DecodeRequest) -> PrefillStats:
        num_known = len(request.token_ids) // 4
        cached = self.script.cached_tokens
        return PrefillStats(num_known - cached, 0, cached, 0.01, 0.0, 0.02)


def say(params: SamplingParams, seq: int) -> int:
    """The pretended model."""
    if seq < len(params.forced_token_ids):
        return params.forced_token_ids[seq]
    return FILLER


def _logprobs(params: SamplingParams, token_id: int) -> PositionLogprobs | None:
    if params.logprobs is None:
        return None
    top = tuple(TokenLogprob(i, -1.0 - i, i + 1) for i in range(params.logprobs))
    return PositionLogprobs(TokenLogprob(token_id, -0.5, 1), top)


def _prompt_logprobs(request: PrefillRequest | DecodeRequest) -> tuple[PositionLogprobs, ...]:
    params = request.params
    if params.prompt_logprobs is None:
        return ()
    asked = dataclasses.replace(params, logprobs=params.prompt_logprobs)
    token_ids = unpack_token_ids(request.token_ids)[1:]
    made = (_logprobs(asked, token_id) for token_id in token_ids)
    return tuple(p for p in made if p is not None)


def _idle_report(role: WorkerRole) -> WorkerReport:
    prefill = PrefillLoad(0, 0, 0, 10_000)
    decode = DecodeLoad(0, 0, 0, 10_000, 0.01)
    return WorkerReport(
        None if role is WorkerRole.DECODE else prefill,
        None if role is WorkerRole.PREFILL else decode,
        draining=False,
    )


class Cluster:
    """The parts of a running cluster."""

    def __init__(self, folder: Path, gateway: GatewayConfig) -> None:
        self.folder = folder
        self.config = gateway
        self.workers: list[FakeWorker] = []
        self.conductor: ConductorService
        self.gateway: Gateway
        self.session: aiohttp.ClientSession
        self._stops: list[Callable[[], Awaitable[None]]] = []

    async def start_conductor(self) -> None:
        self.conductor = ConductorService(
            ConductorConfig(policy="round-robin", block_size=BLOCK, report_interval_s=0.05,
                            worker_timeout_s=60),
            identity=Identity("conductor", "conductor", incarnation()), secret=SECRET,
            listen=LOCAL, epoch_file=self.folder / "epoch", event_log=None,
        )  # fmt: skip
        await self.conductor.start()
        self._stops.append(self.conductor.stop)

    async def add_worker(self, role: WorkerRole, name: str) -> FakeWorker:
        worker = FakeWorker(role, name, self.address)
        await worker.start()
        self.workers.append(worker)
        return worker

    def address(self) -> Address:
        return self.conductor.address

    async def start_gateway(self, **kwargs: float) -> None:
        async def resolve() -> Address:
            return self.address()

        self.gateway = Gateway(
            self.config, tokenizer=TOKENIZER, hash_root=hash_root, eos_token_ids=(EOS_ID,),
            identity=Identity("gateway", "gateway", incarnation()), secret=SECRET,
            host="127.0.0.1", port=0, resolve_conductor=resolve, **kwargs,
        )  # fmt: skip
        await self.gateway.start()
        self._stops.append(self.gateway.stop)
        self.session = aiohttp.ClientSession(self.url)
        self._stops.append(self.session.close)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def settle(self) -> None:
        """Wait until the gateway has nothing in flight; fails when something is left."""
        dispatcher = self.gateway.dispatcher
        async with asyncio.timeout(5):
            while dispatcher.num_requests or dispatcher.num_tasks > 1:
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for worker in self.workers:
            self._stops.append(worker.kill)
        while self._stops:
            await self._stops.pop()()


def hash_root(salt: str) -> HashRoot:
    return HashRoot("model", "tokenizer", "float32", "layout", BLOCK, salt)


def config(**changes: object) -> GatewayConfig:
    base = GatewayConfig(
        model_name=MODEL, max_model_len=512, block_size=BLOCK, enable_forced_tokens=True,
        place_timeout_s=2.0, retry_window_s=5.0,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    gateway: GatewayConfig | None = None,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_coupled: int = 0,
    **kwargs: float,
) -> AsyncIterator[Cluster]:
    """Run a cluster; afterwards nothing may be left in the gateway."""
    cluster = Cluster(folder, gateway or config())
    try:
        await cluster.start_conductor()
        for i in range(num_prefill):
            await cluster.add_worker(WorkerRole.PREFILL, f"p{i}")
        for i in range(num_decode):
            await cluster.add_worker(WorkerRole.DECODE, f"d{i}")
        for i in range(num_coupled):
            await cluster.add_worker(WorkerRole.COUPLED, f"c{i}")
        await cluster.start_gateway(**kwargs)
        yield cluster
        await cluster.settle()
    finally:
        await cluster.stop()
