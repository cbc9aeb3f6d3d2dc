"""A whole cluster in one virtual loop: the real shells and state machines, toy engines, no ray.

Each process kind is the class that a real process runs. `kill` takes one off the network without
a goodbye, `restart` brings it back under a new incarnation, as Ray would.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decode.pool_link
import decode.worker
import kvpool.client
from cluster.gateway.dispatch import Dispatcher, Generation
from cluster.gateway.metrics import Metrics
from cluster.request_events import (
    EndRequest,
    Outcome,
    RequestSpec,
    RetryLimits,
    StreamToken,
    TextDelta,
)
from core.config import ConductorConfig, DecodeConfig, PoolNodeConfig, PrefillConfig
from core.errors import ConnectionLost
from core.hashing import HashRoot, extend_block_hashes
from core.ids import Address, Incarnation, RequestId
from core.net import Identity
from core.requests import SamplingParams
from decode.worker import DecodeWorker
from engine.toy import ToyEngine, toy_spec
from kvpool.memory import Segments
from kvpool.node import PoolNode
from prefill.batcher import PrefillBatcher
from prefill.worker import PrefillWorker
from scheduler.service import ConductorService
from tests.harness.leftovers import leftovers
from tests.harness.sim_net import SimNet

SECRET = b"k" * 32
BLOCK_SIZE = 4
SPEC = toy_spec(block_size=BLOCK_SIZE, vocab_size=500, eos_token_ids=(7,), max_model_len=256)
ROOT = HashRoot(SPEC.fingerprint, "toy", SPEC.kv_dtype, "toy", BLOCK_SIZE).digest()


class VirtualTime:
    """Stands in for the module `time` where a shell measures durations."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()


class NoText:
    """Output without text: the simulation compares tokens."""

    def push(self, token_id: int, *, ends_generation: bool) -> TextDelta:
        return TextDelta("", stopped=False)

    def finish(self) -> TextDelta:
        return TextDelta("", stopped=False)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the simulated cluster is."""

    hosts: int = 2
    prefill: int = 2
    decode: int = 2
    coupled: int = 0
    pool_slots: int = 200
    prefill_blocks: int = 100
    decode_blocks: int = 100
    policy: str = "kvcache-centric"


@dataclass(slots=True)
class Answer:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    migrations: int = 0


class SimCluster:
    """Start with `await start()` inside `run_virtual`; end with `await stop()`."""

    def __init__(
        self, seed: int, directory: Path, net: SimNet, monkeypatch: Any, shape: Shape
    ) -> None:
        self.chance = random.Random(seed)
        self.net, self.shape = net, shape
        self._directory = directory
        self._lives = itertools.count(1)
        self._conductor_address = Address("127.0.0.1", 1)
        self.services: dict[str, Any] = {}
        self._makers: dict[str, Callable[[Identity], Any]] = {"conductor": self._conductor}
        for host in range(shape.hosts):
            self._makers[f"pool-{host}"] = self._pool
        for kind, count in (("prefill", shape.prefill), ("decode", shape.decode)):
            for index in range(count):
                self._makers[f"{kind}-{index}"] = getattr(self, f"_{kind}")
        for index in range(shape.coupled):
            self._makers[f"coupled-{index}"] = self._coupled
        self._makers["gateway"] = self._gateway
        net.install(monkeypatch)
        monkeypatch.setattr(decode.worker, "time", VirtualTime)
        monkeypatch.setattr(decode.pool_link, "time", VirtualTime)
        monkeypatch.setattr(kvpool.client, "receive_segments", self._receive_segments)

    # --- processes ---

    async def start(self) -> None:
        for name in self._makers:
            await self.restart(name)
        while len((await self.dispatcher.cluster_state(5.0)).workers) < len(self._makers) - 2:
            await asyncio.sleep(0.05)

    async def restart(self, name: str) -> None:
        """Start a process that is not running, under a new incarnation."""
        assert name not in self.services
        kind = "decode" if name.startswith("coupled") else name.split("-")[0]
        identity = Identity(kind, name, Incarnation(f"{next(self._lives):016x}"))
        service = self._makers[name](identity)
        self.services[name] = service
        started = service.start()
        if started is not None:
            await started

    async def kill(self, name: str) -> None:
        """Take a process away: its connections break, nothing more of it is heard."""
        service = self.services.pop(name)
        for endpoint, listener in list(self.net.listeners.items()):
            if listener.identity.name == name:
                del self.net.listeners[endpoint]
        self.net.cut(name)
        self.net.faults.hung.discard(name)
        await service.stop()

    async def stop(self) -> None:
        for name in reversed(list(self.services)):
            await self.services.pop(name).stop()

    @property
    def dispatcher(self) -> Dispatcher:
        dispatcher = self.services["gateway"]
        assert isinstance(dispatcher, Dispatcher)
        return dispatcher

    async def _resolve(self) -> Address:
        return self._conductor_address

    def _host_socket(self, name: str) -> Path:
        host = int(name.split("-")[1]) % self.shape.hosts
        return self._directory / f"pool-{host}.sock"

    def _conductor(self, identity: Identity) -> ConductorService:
        config = ConductorConfig(
            policy=self.shape.policy, block_size=BLOCK_SIZE, block_bytes=SPEC.block_bytes
        )
        return ConductorService(
            config,
            identity=identity,
            secret=SECRET,
            listen=self._conductor_address,
            epoch_file=self._directory / "epoch",
            event_log=None,
        )

    def _pool(self, identity: Identity) -> PoolNode:
        config = PoolNodeConfig(
            num_slots=self.shape.pool_slots,
            slot_bytes=SPEC.block_bytes,
            num_layers=SPEC.num_layers,
        )
        return PoolNode(
            config,
            identity=identity,
            secret=SECRET,
            listen=Address("127.0.0.1", 0),
            socket_dir=self._directory,
            resolve_conductor=self._resolve,
        )

    def _prefill(self, identity: Identity) -> PrefillWorker:
        return PrefillWorker(
            PrefillConfig(max_chunk_tokens=32, max_chunk_requests=4),
            ToyEngine(SPEC, self.shape.prefill_blocks),
            identity=identity,
            secret=SECRET,
            listen=Address("127.0.0.1", 0),
            pool_socket=self._host_socket(identity.name),
            resolve_conductor=self._resolve,
        )

    def _decode(self, identity: Identity, coupled: PrefillBatcher | None = None) -> DecodeWorker:
        return DecodeWorker(
            DecodeConfig(max_batch=8, max_chunk_tokens=32),
            ToyEngine(SPEC, self.shape.decode_blocks),
            identity=identity,
            secret=SECRET,
            listen=Address("127.0.0.1", 0),
            pool_socket=self._host_socket(identity.name),
            resolve_conductor=self._resolve,
            coupled=coupled,
        )

    def _coupled(self, identity: Identity) -> DecodeWorker:
        batcher = PrefillBatcher(max_chunk_tokens=32, max_chunk_requests=4, block_size=BLOCK_SIZE)
        return self._decode(identity, batcher)

    def _gateway(self, identity: Identity) -> Dispatcher:
        return Dispatcher(
            identity=identity,
            secret=SECRET,
            address=lambda: Address("127.0.0.1", 2),
            resolve_conductor=self._resolve,
            limits=RetryLimits(max_failures=20, window_s=120.0, stall_s=60.0),
            place_timeout_s=10.0,
            metrics=Metrics("toy"),
        )

    def _receive_segments(self, path: Path, timeout_s: float) -> Any:
        """What `kvpool.handover` does between processes, within one."""
        node = self.services.get(path.stem)
        if not isinstance(node, PoolNode) or not path.exists():
            raise ConnectionLost(f"no pool node at {path}")
        return node.ref, Segments(node._layout, node._fds)

    def flip_bits(self, name: str, count: int) -> None:
        """Corrupt `count` random slots of a pool node, one bit each, as failing memory would."""
        node = self.services.get(name)
        if isinstance(node, PoolNode):
            for _ in range(count):
                slot = node._segments.slot(self.chance.randrange(self.shape.pool_slots))
                slot[self.chance.randrange(len(slot))] ^= 1 << self.chance.randrange(8)

    # --- requests ---

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        leave_after: int | None = None,
    ) -> Answer:
        """Run one request; with `leave_after` the client leaves after that many tokens."""
        generation = Generation(1 << 20, lambda: None)
        self.dispatcher.submit(
            [(lambda request: _spec(request, prompt, params), NoText())], generation
        )
        answer = Answer()
        while True:
            if leave_after is not None and len(answer.token_ids) >= leave_after:
                leave_after = None
                generation.abandon()
            _, output = await generation.next()
            match output:
                case StreamToken(token):
                    answer.token_ids.append(token.token_id)
                    answer.migrations = token.attempt.attempt - 1
                case EndRequest():
                    answer.outcome = output.outcome
                    return answer

    # --- what must be true when nothing runs ---

    def leftovers(self) -> list[str]:
        """Everything that is not at its base value; empty when all is well."""
        return leftovers(self.services)

    async def settle(self, limit_s: float = 90.0) -> None:
        """Wait until nothing is left over. Raises `AssertionError` with what is."""
        deadline_s = asyncio.get_running_loop().time() + limit_s
        while left := self.leftovers():
            assert asyncio.get_running_loop().time() < deadline_s, left
            await asyncio.sleep(0.25)
        state = await self.dispatcher.cluster_state(5.0)
        assert all(w.num_assigned == 0 for w in state.workers), state.workers


def _spec(request: RequestId, prompt: Sequence[int], params: SamplingParams) -> RequestSpec:
    hashes = tuple(extend_block_hashes(ROOT, prompt, BLOCK_SIZE))
    return RequestSpec(request, tuple(prompt), hashes, ROOT, BLOCK_SIZE, params)
