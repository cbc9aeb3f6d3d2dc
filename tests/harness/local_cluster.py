"""A whole cluster in one process and one loop: real sockets, real shared memory, toy engines.

What runs is what a deployment runs, from HTTP down to the slots of the pool nodes; only Ray and the
model are missing. `kill` and `restart` take parts away and bring them back under a new incarnation;
`proxied` puts a misbehaving wire between two parts; engines can be held in the middle of their
work; `only` names the workers that new requests are placed on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

import cluster.gateway.service
import core.links
import core.net
import kvpool.writers
import scheduler.conductor
import scheduler.policies
from cluster.gateway.prompts import choice_seed
from cluster.gateway.service import Gateway
from cluster.gateway.validation import GREEDY_BELOW
from core.config import ConductorConfig, DecodeConfig, GatewayConfig, PoolNodeConfig, PrefillConfig
from core.hashing import HashRoot, extend_block_hashes
from core.ids import Address, BlockHash, Incarnation
from core.messages.to_conductor import WorkerState
from core.net import Connection, Identity
from core.requests import SamplingParams
from decode.worker import DecodeWorker
from engine.base import LayerDone, ModelSpec, SequenceResult, SequenceStep
from engine.toy import ToyEngine, toy_generate, toy_spec
from kvpool.node import PoolNode
from prefill.batcher import PrefillBatcher
from prefill.worker import PrefillWorker
from scheduler.decode_choice import DecodeCandidate, choose_decode
from scheduler.policies import Candidate, Choice, PolicyState, choose_round_robin
from scheduler.service import ConductorService
from tests.gateway.client import Streamed, parse
from tests.gateway.tiny_tokenizer import EOS, tiny_tokenizer
from tests.harness.fault_proxy import FaultProxy
from tests.harness.leftovers import leftovers

SECRET = b"e" * 32
LOCAL = Address("127.0.0.1", 0)
MODEL = "toy"
TOKENIZER = tiny_tokenizer()
EOS_ID = TOKENIZER.encode(EOS, add_special_tokens=False)[0]
_C = TypeVar("_C", Candidate, DecodeCandidate)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMIT_S = 60.0
"""Deadline of every wait; nothing that works comes near it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the cluster is. A chunk is no whole number of blocks on purpose."""

    hosts: int = 2
    prefill: int = 2
    decode: int = 2
    coupled: int = 0
    block_size: int = 8
    head_dim: int = 8
    max_model_len: int = 256
    chunk_tokens: int = 20
    pool_slots: int = 400
    prefill_blocks: int = 200
    decode_blocks: int = 200
    load_timeout_s: float = 10.0
    policy: str = "turns"

    @property
    def spec(self) -> ModelSpec:
        return toy_spec(
            block_size=self.block_size,
            vocab_size=TOKENIZER.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=(EOS_ID,),
            head_dim=self.head_dim,
        )


class HeldEngine(ToyEngine):
    """A toy engine whose threads can be stopped between two steps or two loads."""

    def __init__(self, spec: ModelSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        self.num_steps = self.num_loads = 0
        self.is_held = False
        self._step_limit: int | None = None
        self._load_limit: int | None = None
        self._go = threading.Event()

    def hold_steps(self, after: int = 0) -> None:
        """Stop before the step that follows `after` more."""
        self._go.clear()
        self._step_limit = self.num_steps + after

    def hold_loads(self, after: int = 0) -> None:
        """Stop in the load of a block from the pool, after `after` more blocks."""
        self._go.clear()
        self._load_limit = self.num_loads + after

    def release(self) -> None:
        """Go on."""
        self._step_limit = self._load_limit = None
        self._go.set()

    def step(
        self, sequences: Sequence[SequenceStep], layer_done: LayerDone | None = None
    ) -> list[SequenceResult]:
        if self._step_limit is not None and self.num_steps >= self._step_limit:
            self._wait()
        self.num_steps += 1
        return super().step(sequences, layer_done)

    def write_block(self, block_id: int, data: memoryview) -> None:
        if self._load_limit is not None and self.num_loads >= self._load_limit:
            self._wait()
        self.num_loads += 1
        super().write_block(block_id, data)

    def _wait(self) -> None:
        self.is_held = True
        if not self._go.wait(LIMIT_S):
            raise TimeoutError("nobody released the engine")
        self.is_held = False


@dataclass(slots=True)
class Reply:
    """An answer: `body` when it is whole, `stream` when it is streamed."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)
    stream: Streamed = field(default_factory=Streamed)

    @property
    def token_ids(self) -> list[int]:
        return self.token_ids_of(0)

    def token_ids_of(self, index: int) -> list[int]:
        assert self.status == 200 and not self.stream.errors, (self.body, self.stream.errors)
        if self.body:
            return list(self.body["choices"][index]["token_ids"])
        choices = (c for chunk in self.stream.chunks for c in chunk["choices"])
        return [t for c in choices if c["index"] == index for t in c.get("token_ids") or ()]

    @property
    def text(self) -> str:
        assert self.status == 200 and not self.stream.errors, (self.body, self.stream.errors)
        if not self.body:
            return self.stream.text()
        choice = self.body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def finish(self) -> str:
        if self.body:
            return str(self.body["choices"][0]["finish_reason"])
        (finish,) = self.stream.finishes()
        return str(finish)

    @property
    def usage(self) -> dict[str, Any]:
        made: dict[str, Any] = self.body["usage"] if self.body else self.stream.chunks[-1]["usage"]
        return made

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class LocalCluster:
    """See the module's docstring; made by `running`."""

    def __init__(self, directory: Path, monkeypatch: Any, shape: Shape, **gateway: Any) -> None:
        self.shape, self.spec = shape, shape.spec
        self.services: dict[str, Any] = {}
        self.engines: dict[str, HeldEngine] = {}
        self.session: aiohttp.ClientSession
        self.only: set[str] = set()
        self._directory = directory
        self._gateway_changes = gateway
        self._lives = itertools.count(1)
        self._proxies = AsyncExitStack()
        self._routes: dict[tuple[str, Address], Address] = {}
        self._makers: dict[str, Callable[[Identity], Any]] = {"conductor": self._conductor}
        self._makers |= {f"pool-{i}": self._pool for i in range(shape.hosts)}
        for kind in ("prefill", "decode", "coupled"):
            make = getattr(self, f"_{kind}")
            self._makers |= {f"{kind}-{i}": make for i in range(getattr(shape, kind))}
        self._makers["gateway"] = self._gateway
        monkeypatch.setattr(cluster.gateway.service, "POLL_S", 0.05)
        monkeypatch.setitem(scheduler.policies.POLICIES, "turns", self._choose_prefill)
        monkeypatch.setattr(scheduler.conductor, "choose_decode", self._choose_decode)
        for module in (core.links, kvpool.writers):
            monkeypatch.setattr(module, "dial", self._dial)

    # --- placing ---

    def _among(self, candidates: Sequence[_C]) -> Sequence[_C]:
        """Those that `only` names, if it names some of them."""
        lives = {self.services[n].ref.incarnation for n in self.only if n in self.services}
        return [c for c in candidates if c.worker in lives] or candidates

    def _choose_prefill(self, candidates: Sequence[Candidate], state: PolicyState) -> Choice:
        """Each in turn, and what it lacks is always fetched from where it is."""
        chosen = choose_round_robin(self._among(candidates), state)
        fetch = chosen.candidate.best_blocks > chosen.candidate.local_blocks
        return dataclasses.replace(chosen, fetch=fetch)

    def _choose_decode(self, candidates: Sequence[DecodeCandidate]) -> DecodeCandidate:
        return choose_decode(self._among(candidates))

    # --- processes ---

    async def start(self) -> None:
        for name in self._makers:
            await self.restart(name)
        # Every request has a connection of its own, so that descriptors can be counted.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self.session = aiohttp.ClientSession(self.url, connector=connector)
        await self.until_registered()

    async def until_registered(self) -> None:
        """Wait until the Conductor knows every worker that runs, and `/ready` says so."""
        names = self.services.keys() - {"conductor", "gateway"}
        lives = {self.services[n].ref.incarnation for n in names}

        async def known() -> bool:
            if {w.incarnation for w in await self.workers()} != lives:
                return False
            async with self.session.get("/ready") as response:
                return response.status == 200

        async with asyncio.timeout(LIMIT_S):
            while not await known():
                await asyncio.sleep(0.02)

    async def restart(self, name: str) -> None:
        """Start a process that is not running, under a new incarnation."""
        assert name not in self.services
        kind = "decode" if name.startswith("coupled") else name.split("-")[0]
        service = self._makers[name](Identity(kind, name, Incarnation(f"{next(self._lives):016x}")))
        await service.start()
        self.services[name] = service

    async def kill(self, name: str) -> None:
        """Take a process away: its connections break, nothing more of it is heard."""
        service = self.services.pop(name)
        if name in self.engines:
            self.engines.pop(name).release()
        await service.stop()

    async def stop(self) -> None:
        for engine in self.engines.values():
            engine.release()
        if self.session is not None:
            await self.session.close()
        for name in reversed(list(self.services)):
            await self.services.pop(name).stop()
        await self._proxies.aclose()

    def hold(self, kind: str, after: int = 0) -> None:
        """Hold every engine of a kind before the step that follows `after` more of its own."""
        for name, engine in self.engines.items():
            if name.startswith(kind):
                engine.hold_steps(after)

    async def held(self, kind: str) -> str:
        """Wait until one engine of a kind is held, let the others go, and return its name."""
        mine = {n: e for n, e in self.engines.items() if n.startswith(kind)}
        await self.until(lambda: any(e.is_held for e in mine.values()))
        held = next(name for name, engine in mine.items() if engine.is_held)
        for name, engine in mine.items():
            if name != held:
                engine.release()
        return held

    async def proxied(self, dialler: str, listener: str) -> FaultProxy:
        """Lead what `dialler` opens to this life of `listener` through a proxy from now on."""
        service = self.services[listener]
        proxy = await self._proxies.enter_async_context(FaultProxy(service.ref.address))
        self._routes[dialler, service.ref.address] = proxy.address
        return proxy

    async def _dial(self, endpoint: Any, handler: Any, **kwargs: Any) -> Connection:
        endpoint = self._routes.get((kwargs["identity"].name, endpoint), endpoint)
        return await core.net.dial(endpoint, handler, **kwargs)

    async def _resolve(self) -> Address:
        address = self.services["conductor"].address
        assert isinstance(address, Address)
        return address

    def _common(self, identity: Identity) -> dict[str, Any]:
        return {"identity": identity, "secret": SECRET, "resolve_conductor": self._resolve}

    def _worker(self, identity: Identity, num_blocks: int) -> dict[str, Any]:
        self.engines[identity.name] = HeldEngine(self.spec, num_blocks)
        host = int(identity.name.split("-")[1]) % self.shape.hosts
        socket = self._directory / f"pool-{host}.sock"
        return {**self._common(identity), "listen": LOCAL, "pool_socket": socket}

    def _conductor(self, identity: Identity) -> ConductorService:
        config = ConductorConfig(
            policy=self.shape.policy,
            block_size=self.spec.block_size,
            block_bytes=self.spec.block_bytes,
            report_interval_s=0.1,
        )
        return ConductorService(
            config,
            identity=identity,
            secret=SECRET,
            listen=LOCAL,
            epoch_file=self._directory / "epoch",
            event_log=None,
        )

    def _pool(self, identity: Identity) -> PoolNode:
        config = PoolNodeConfig(
            num_slots=self.shape.pool_slots,
            slot_bytes=self.spec.block_bytes,
            num_layers=self.spec.num_layers,
            reserve_ttl_s=4 * LIMIT_S,  # what only this would heal must not pass
            report_interval_s=0.1,
            event_interval_s=0.02,
        )
        return PoolNode(config, listen=LOCAL, socket_dir=self._directory, **self._common(identity))

    def _prefill(self, identity: Identity) -> PrefillWorker:
        more = self._worker(identity, self.shape.prefill_blocks)
        config = PrefillConfig(
            max_chunk_tokens=self.shape.chunk_tokens,
            max_chunk_requests=4,
            load_timeout_s=self.shape.load_timeout_s,
            report_interval_s=0.1,
        )
        return PrefillWorker(config, self.engines[identity.name], **more)

    def _decode(self, identity: Identity, coupled: PrefillBatcher | None = None) -> DecodeWorker:
        more = self._worker(identity, self.shape.decode_blocks)
        config = DecodeConfig(
            max_batch=8, max_chunk_tokens=self.shape.chunk_tokens, report_interval_s=0.1
        )
        return DecodeWorker(config, self.engines[identity.name], coupled=coupled, **more)

    def _coupled(self, identity: Identity) -> DecodeWorker:
        batcher = PrefillBatcher(
            max_chunk_tokens=self.shape.chunk_tokens,
            max_chunk_requests=4,
            block_size=self.spec.block_size,
        )
        return self._decode(identity, batcher)

    def _gateway(self, identity: Identity) -> Gateway:
        config = GatewayConfig(
            model_name=MODEL,
            max_model_len=self.spec.max_model_len,
            block_size=self.spec.block_size,
            enable_forced_tokens=True,
        )
        return Gateway(
            dataclasses.replace(config, **self._gateway_changes),
            tokenizer=TOKENIZER,
            hash_root=self._hash_root,
            eos_token_ids=self.spec.eos_token_ids,
            host="127.0.0.1",
            port=0,
            **self._common(identity),
        )

    # --- asking ---

    @property
    def gateway(self) -> Gateway:
        gateway = self.services["gateway"]
        assert isinstance(gateway, Gateway)
        return gateway

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def workers(self) -> Sequence[WorkerState]:
        """What the Conductor knows of the workers."""
        return (await self.gateway.dispatcher.cluster_state(LIMIT_S)).workers

    def _hash_root(self, salt: str) -> HashRoot:
        spec = self.spec
        return HashRoot(spec.fingerprint, "tiny", spec.kv_dtype, "toy", spec.block_size, salt)

    def block_hashes(self, prompt: Sequence[int]) -> list[BlockHash]:
        """The hashes of a prompt's full blocks."""
        return extend_block_hashes(self._hash_root("").digest(), prompt, self.spec.block_size)

    def oracle(self, prompt: Sequence[int], choice: int = 0, /, **fields: Any) -> list[int]:
        """The right tokens for a body's fields, straight from the prompt."""
        eos = () if fields.get("ignore_eos") else self.spec.eos_token_ids
        params = SamplingParams(
            max_tokens=fields.get("max_tokens") or self.spec.max_model_len - len(prompt),
            min_tokens=fields.get("min_tokens", 0),
            temperature=0.0 if (t := fields.get("temperature", 0)) < GREEDY_BELOW else t,
            seed=choice_seed(fields.get("seed", 0), choice),
            stop_token_ids=tuple(sorted({*fields.get("stop_token_ids", ()), *eos})),
            forced_token_ids=tuple(fields.get("forced_token_ids", ())),
        )
        return toy_generate(prompt, params, self.spec)

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        """Send a body as it is."""
        async with asyncio.timeout(LIMIT_S), self.session.post(path, json=body) as response:
            raw = await response.text()
            headers = dict(response.headers)
            if headers["Content-Type"].startswith("text/event-stream"):
                return Reply(response.status, headers, stream=parse(raw))
            return Reply(response.status, headers, body=json.loads(raw))

    async def complete(self, prompt: Any, path: str = COMPLETIONS, /, **fields: Any) -> Reply:
        """Ask, greedy unless told otherwise, with the tokens beside the text."""
        shown = {"messages": [{"role": "user", "content": prompt}]}
        body = {"model": MODEL, "temperature": 0, "return_token_ids": True}
        if fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return await self.post(
            path, body | (shown if path == CHAT else {"prompt": prompt}) | fields
        )

    async def check(self, prompt: Sequence[int], **fields: Any) -> Reply:
        """Ask and compare tokens, text and count with the oracle."""
        fields.setdefault("max_tokens", 8)
        reply = await self.complete(list(prompt), **fields)
        expected = self.oracle(prompt, **fields)
        assert reply.token_ids == expected, (len(prompt), fields)
        is_stopped = expected[-1] in {*fields.get("stop_token_ids", ()), EOS_ID}
        shown = expected[:-1] if is_stopped and reply.finish == "stop" else expected
        assert reply.text == TOKENIZER.decode(shown, skip_special_tokens=True)
        assert reply.usage["completion_tokens"] == len(expected)
        assert reply.usage["prompt_tokens"] == len(prompt)
        return reply

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(
            float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith((name + "{", name + " "))
        )

    def pool_counter(self, name: str) -> int:
        """A counter of `PoolStats`, summed over the nodes."""
        nodes = (s for s in self.services.values() if isinstance(s, PoolNode))
        return sum(dict(node.stats().counters).get(name, 0) for node in nodes)

    async def until(self, what: Callable[[], object]) -> None:
        """Wait for something to be so."""
        async with asyncio.timeout(LIMIT_S):
            while not what():
                await asyncio.sleep(0.005)

    # --- what must be true afterwards ---

    async def settle(self) -> None:
        """Wait until nothing is left over. Raises `AssertionError` with what is."""
        deadline_s = asyncio.get_running_loop().time() + LIMIT_S
        while left := leftovers(self.services):
            assert asyncio.get_running_loop().time() < deadline_s, left
            await asyncio.sleep(0.01)
        while left := [str(w) for w in await self.workers() if w.num_assigned]:
            assert asyncio.get_running_loop().time() < deadline_s, left
            await asyncio.sleep(0.01)
        await self.until(self._is_indexed)

    def _is_indexed(self) -> bool:
        """Whether the Conductor's directory says exactly what the pool nodes hold."""
        nodes = (s for s in self.services.values() if isinstance(s, PoolNode))
        held = Counter(h for node in nodes for h in node._state.table.public_hashes())
        directory = self.services["conductor"].conductor.directory
        return directory.num_blocks == len(held) and all(
            directory.num_replicas(h) == count for h, count in held.items()
        )

    async def check_base(self) -> None:
        """After every case: alive, right, and every counter at its base."""
        await self.settle()
        async with self.session.get("/health") as response:
            assert response.status == 200
        await self.check([11, 12, 13, 14, 15] * 4)
        await self.settle()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (counts, and nothing is opened by name)


@asynccontextmanager
async def running(
    monkeypatch: Any, shape: Shape | None = None, **gateway: Any
) -> AsyncIterator[LocalCluster]:
    """Run a cluster; afterwards everything is at its base, and nothing at all is left of it."""
    num_tasks, num_fds = len(asyncio.all_tasks()), num_descriptors()
    with tempfile.TemporaryDirectory(prefix="hm-") as directory:  # short: socket paths are
        made = LocalCluster(Path(directory), monkeypatch, shape or Shape(), **gateway)
        try:
            await made.start()
            yield made
            await made.check_base()
        finally:
            await made.stop()
        assert [p.name for p in Path(directory).iterdir()] == ["epoch"]
    await made.until(lambda: len(asyncio.all_tasks()) <= num_tasks)
    gc.collect()  # mappings of shared memory may hang on the frames of an exception
    assert num_descriptors() == num_fds
