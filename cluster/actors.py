"""Thin Ray actors, one per kind of process, around the services that do the work.

An actor starts its service in an asyncio loop of its own thread and answers rare control calls:
`ready`, `address`, `stats`, `stop`. Ray restarts a process that dies by running `__init__` again.
Heavy modules are imported by the process that needs them, after its thread counts are set.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import gc
import logging
import logging.handlers
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import ray
from ray.exceptions import RayError

from cluster.plans import KV_LAYOUT, EnginePlan, GatewayPlan, PoolPlan, WorkerPlan
from cluster.state_dir import ProcessRecord, StateDir
from core.batching import ChunkBatcher
from core.config import ConductorConfig, DecodeConfig, PrefillConfig
from core.errors import ConnectionLost
from core.hashing import HashRoot
from core.ids import Address, Incarnation
from core.messages.to_conductor import WorkerRole
from core.net import Identity
from engine.base import Engine

log = logging.getLogger(__name__)

CONDUCTOR = "conductor"
RESOLVE_TIMEOUT_S = 3.0
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
_RESTART_PAUSE_S = 1.0
_LOG_BYTES, _LOG_FILES = 20 << 20, 3
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What every process is told. `listen` is an address, or `node` for the machine's own."""

    name: str
    kind: str
    namespace: str
    state_dir: str
    run_dir: str
    listen: str
    log_level: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a service is made with, besides its configuration."""

    identity: Identity
    secret: bytes
    listen: Address
    resolve_conductor: Callable[[], Awaitable[Address]]
    state: StateDir
    socket_dir: Path


class Service(Protocol):
    """What all the parts look like from here."""

    async def start(self) -> None:
        """Begin; return when it works."""
        ...

    async def stop(self) -> None:
        """End, leaving nothing behind."""
        ...


S = TypeVar("S", bound=Service)


class ServiceThread:
    """Runs one service in a loop of its own, for the life of the process.

    `make` builds the service, `locate` tells where it listens once started. When the service
    cannot start, `ready` raises why; in a process that Ray restarted, the process ends instead,
    and Ray tries again.
    """

    def __init__(
        self,
        setup: ProcessSetup,
        make: Callable[[Surroundings], Awaitable[S]],
        locate: Callable[[S], Address],
    ) -> None:
        self._setup = setup
        self._make, self._locate = make, locate
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started: concurrent.futures.Future[ProcessRecord] = concurrent.futures.Future()
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        _log_to(StateDir(setup.state_dir).logs / f"{setup.name}.log", setup.log_level)
        self._thread.start()

    def ready(self, timeout_s: float) -> ProcessRecord:
        """Wait until the service works. Raises what stopped it from starting, `TimeoutError`."""
        return self._started.result(timeout_s)

    def stop(self) -> None:
        """Stop the service and wait for it."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            log.exception("%s failed", self._setup.name)
            if not self._started.done():
                self._started.set_exception(error)
                if not self._restarted:
                    return
            time.sleep(_RESTART_PAUSE_S)
            os._exit(1)

    async def _serve(self) -> None:
        setup = self._setup
        state = StateDir(setup.state_dir)
        incarnation = Incarnation(secrets.token_hex(8))
        node_ip: Callable[[], str] = ray.util.get_node_ip_address
        host = node_ip() if setup.listen == "node" else setup.listen
        service = await self._make(
            Surroundings(
                identity=Identity(setup.kind, setup.name, incarnation),
                secret=state.read_secret(),
                listen=Address(host, 0),
                resolve_conductor=lambda: find_conductor(setup.namespace),
                state=state,
                socket_dir=Path(setup.run_dir) / "sockets",
            )
        )
        await service.start()
        try:
            life = ProcessRecord(
                name=setup.name,
                kind=setup.kind,
                incarnation=incarnation,
                pid=os.getpid(),
                created_s=psutil.Process().create_time(),
                address=self._locate(service),
            )
            record = state.write_process(life)
            self._started.set_result(record)
            log.info("%s started: %s", setup.name, record)
            await self._until_over(service)
        finally:
            await service.stop()

    async def _until_over(self, service: Service) -> None:
        """Wait for `stop`; raise what broke the service for good before that."""
        failed: asyncio.Future[None] | None = getattr(service, "failed", None)
        stopping = asyncio.ensure_future(self._stopping.wait())
        events: list[asyncio.Future[Any]] = [stopping, *([] if failed is None else [failed])]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if failed is not None and failed.done() and not self._stopping.is_set():
            failed.result()


async def find_conductor(namespace: str) -> Address:
    """Return the address of the Conductor's present life. Raises `ConnectionLost`."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            handle: Any = await asyncio.to_thread(ray.get_actor, CONDUCTOR, namespace)
            address: Address = await handle.address.remote()
            return address
    except (RayError, ValueError, TimeoutError) as error:
        raise ConnectionLost(f"no Conductor to be found: {error or 'timed out'}") from error


class _Actor:
    """What every actor answers."""

    _thread: ServiceThread

    def ready(self) -> ProcessRecord:
        """Wait until the service works. Raises what stopped it from starting."""
        return self._thread.ready(START_TIMEOUT_S)

    def stop(self) -> None:
        """Stop the service."""
        self._thread.stop()


class ConductorActor(_Actor):
    """The Conductor's process."""

    def __init__(self, setup: ProcessSetup, config: ConductorConfig, event_log: bool) -> None:
        from scheduler.service import ConductorService

        async def make(around: Surroundings) -> ConductorService:
            return ConductorService(
                config,
                identity=around.identity,
                secret=around.secret,
                listen=around.listen,
                epoch_file=around.state.epoch_file,
                event_log=around.state.event_log if event_log else None,
            )

        self._thread = ServiceThread(setup, make, lambda service: service.address)

    def address(self) -> Address:
        """Where it listens."""
        return self._thread.ready(RESOLVE_TIMEOUT_S).address


class PoolNodeActor(_Actor):
    """A pool node's process."""

    def __init__(self, setup: ProcessSetup, plan: PoolPlan) -> None:
        from kvpool.node import PoolNode

        async def make(around: Surroundings) -> PoolNode:
            around.socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            return PoolNode(
                plan.config,
                identity=around.identity,
                secret=around.secret,
                listen=around.listen,
                socket_dir=around.socket_dir,
                resolve_conductor=around.resolve_conductor,
            )

        self._thread = ServiceThread(setup, make, lambda node: node.ref.address)


class _WorkerActor(_Actor):
    """What prefill and decode workers have in common: an engine, cores, a pool node."""

    def __init__(self, setup: ProcessSetup, plan: WorkerPlan, pool: str) -> None:
        _limit_threads(plan.engine.threads)
        os.nice(plan.nice)

        async def make(around: Surroundings) -> Service:
            _pin(plan.cores)
            with _without_collections():
                engine = make_engine(plan.engine)
            return _make_worker(plan, engine, around, await _pool_socket(around, pool))

        self._thread = ServiceThread(setup, make, _worker_address)


class PrefillActor(_WorkerActor):
    """A prefill worker's process."""


class DecodeActor(_WorkerActor):
    """A decode or coupled worker's process."""


class GatewayActor(_Actor):
    """The gateway's process."""

    def __init__(self, setup: ProcessSetup, plan: GatewayPlan) -> None:
        from cluster.gateway.service import Gateway
        from cluster.gateway.tokenizer import FastTokenizer

        def hash_root(salt: str) -> HashRoot:
            return HashRoot(
                model=plan.fingerprint,
                tokenizer=plan.tokenizer_digest,
                kv_dtype=plan.kv_dtype,
                layout=KV_LAYOUT,
                block_size=plan.config.block_size,
                salt=salt,
            )

        async def make(around: Surroundings) -> Gateway:
            return Gateway(
                plan.config,
                tokenizer=FastTokenizer.load(Path(plan.model_dir)),
                hash_root=hash_root,
                eos_token_ids=plan.eos_token_ids,
                identity=around.identity,
                secret=around.secret,
                host=plan.host,
                port=plan.port,
                resolve_conductor=around.resolve_conductor,
            )

        self._thread = ServiceThread(setup, make, lambda own: Address(plan.host, own.port))


def make_engine(plan: EnginePlan) -> Engine:
    """Load the engine; torch is imported here. Raises `ConfigError`."""
    if plan.kind == "transformers":
        from engine.transformers_engine import TransformersEngine

        engine = TransformersEngine(
            plan.model_dir,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            device=plan.device,
            dtype=plan.dtype,
            num_threads=plan.threads,
        )
        log.info("kernels: %s", engine.isa)
        return engine
    assert plan.spec is not None
    if plan.profile is None:
        from engine.toy import ToyEngine

        return ToyEngine(plan.spec, plan.num_blocks)
    from engine.emulated import EmulatedEngine

    return EmulatedEngine(plan.spec, plan.num_blocks, plan.profile, time.sleep)


def _make_worker(
    plan: WorkerPlan, engine: Engine, around: Surroundings, pool_socket: Path
) -> Service:
    if isinstance(plan.config, PrefillConfig):
        from prefill.worker import PrefillWorker

        return PrefillWorker(
            plan.config,
            engine,
            identity=around.identity,
            secret=around.secret,
            listen=around.listen,
            pool_socket=pool_socket,
            resolve_conductor=around.resolve_conductor,
            profile=plan.engine.profile,
        )
    from decode.worker import DecodeWorker

    assert isinstance(plan.config, DecodeConfig)
    return DecodeWorker(
        plan.config,
        engine,
        identity=around.identity,
        secret=around.secret,
        listen=around.listen,
        pool_socket=pool_socket,
        resolve_conductor=around.resolve_conductor,
        coupled=_prompt_batcher(plan) if plan.role is WorkerRole.COUPLED else None,
    )


def _prompt_batcher(plan: WorkerPlan) -> ChunkBatcher:
    from prefill.batcher import PrefillBatcher

    return PrefillBatcher(
        max_chunk_tokens=plan.config.max_chunk_tokens,
        max_chunk_requests=PrefillConfig().max_chunk_requests,
        block_size=plan.engine.block_size,
    )


def _worker_address(service: Service) -> Address:
    address: Address = service.ref.address  # type: ignore[attr-defined]
    return address


async def _pool_socket(around: Surroundings, pool: str) -> Path:
    """Wait for the host's pool node, which starts at the same time, and return its socket."""
    from kvpool.handover import socket_path

    path = socket_path(around.socket_dir, pool)
    async with asyncio.timeout(START_TIMEOUT_S):
        while not path.exists():
            await asyncio.sleep(_POLL_S)
    return path


def _limit_threads(threads: int) -> None:
    """Bound the thread pools of libraries that are loaded after this."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    # A worker that spins while it waits takes the core from its neighbour.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep what is made here out of all garbage collections.

    Importing torch and transformers makes half a million objects that stay. To walk them again
    and again takes a sixth of the imports' time, and later a pause at every full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _pin(cores: tuple[int, ...]) -> None:
    """Keep this process, the threads it has and those it will have, on `cores`; empty: anywhere."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            log.debug("thread %s ended while it was pinned", task.name)


def _log_to(path: Path, level: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    faulthandler.enable(path.open("a"))
