"""A prefill worker on real sockets, with a real pool node, between a pretended gateway, decode
worker and Conductor."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from core.config import PoolNodeConfig, PrefillConfig
from core.hashing import extend_block_hashes, join_hashes, pack_token_ids
from core.ids import Address, AttemptId, BlockHash, Incarnation, PoolRef, RequestId, WorkerRef
from core.messages import to_conductor, to_decode, to_gateway
from core.messages.to_conductor import BlockSource, Registered, RegisterWorker, WorkerReport
from core.messages.to_decode import PrefillFinished, PrefillGone
from core.messages.to_gateway import AttemptFailed, TokenEmitted, TokenFrame
from core.messages.to_pool import AlreadyCommitted, LeasedBlock, SlotReserved
from core.messages.to_prefill import DecodeSlots, PrefillRequest, ReleasePrefill, SlotForBlock
from core.net import BaseHandler, Connection, Identity, Listener, dial, listen
from core.requests import SamplingParams
from engine.base import LayerDone, ModelSpec, SequenceResult, SequenceStep
from engine.toy import ToyEngine, toy_spec
from kvpool.client import PoolClient
from kvpool.node import PoolNode
from prefill.worker import FROM_DECODE, FROM_GATEWAY, PrefillWorker

SECRET = b"s" * 32
ANY_PORT = Address("127.0.0.1", 0)
BLOCK = 16
SPEC = toy_spec(block_size=BLOCK, num_layers=3, max_model_len=1024)
ROOT = BlockHash(bytes(32))
_lives = itertools.count(1)


def identity(kind: str, name: str) -> Identity:
    return Identity(kind, name, Incarnation(f"{name}-{next(_lives)}"))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * seed + 1) % SPEC.vocab_size for i in range(length))


def reference_blocks(token_ids: Sequence[int], spec: ModelSpec = SPEC) -> list[bytes]:
    """The blocks that a correct engine makes of a prompt, the unfilled one padded with zeros."""
    num_blocks = -(-len(token_ids) // spec.block_size)
    engine = ToyEngine(spec, num_blocks)
    engine.step([SequenceStep(token_ids, 0, range(num_blocks))])
    return [bytes(engine.read_block(i)) for i in range(num_blocks)]


async def eventually(what: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until `what()` is true."""
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.002)


class GatedEngine(ToyEngine):
    """A toy engine that stops after each layer until the gate lets it on, once `gate` is set."""

    def __init__(self, spec: ModelSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        self.gate: threading.Semaphore | None = None
        self.layers_done = 0
        self.fails_on: int | None = None

    def step(
        self, sequences: Sequence[SequenceStep], layer_done: LayerDone | None = None
    ) -> list[SequenceResult]:
        def gated(layer: int) -> None:
            assert layer_done is not None
            self.layers_done += 1
            layer_done(layer)
            if self.gate is not None:
                assert self.gate.acquire(timeout=30), "nobody opened the gate"

        if any(self.fails_on in sequence.token_ids for sequence in sequences):
            raise RuntimeError("the model broke")
        return super().step(sequences, gated)


class Conductor(BaseHandler):
    """Registers everybody."""

    def __init__(self) -> None:
        self.workers: list[RegisterWorker] = []
        self.reports: list[WorkerReport] = []

    async def start(self) -> None:
        self.listener: Listener = await listen(
            ANY_PORT,
            self,
            identity=identity("conductor", "conductor"),
            secret=SECRET,
            sets=lambda kind: (to_conductor.MESSAGES, to_conductor.REPLIES),
        )

    async def resolve(self) -> Address:
        assert isinstance(self.listener.endpoint, Address)
        return self.listener.endpoint

    async def on_request(self, conn, message):
        if isinstance(message, RegisterWorker):
            self.workers.append(message)
        return Registered(1)

    def on_message(self, conn, message, payload):
        if isinstance(message, WorkerReport):
            self.reports.append(message)


class Gateway(BaseHandler):
    def __init__(self, name: str) -> None:
        self.identity = identity("gateway", name)
        self.tokens: dict[AttemptId, TokenEmitted] = {}
        self.failures: dict[AttemptId, AttemptFailed] = {}
        self.num_frames = 0
        self.closed = asyncio.Event()
        self._counter = itertools.count(1)

    async def connect(self, worker: PrefillWorker) -> None:
        self.conn: Connection = await dial(
            worker.ref.address,
            self,
            identity=self.identity,
            secret=SECRET,
            sends=FROM_GATEWAY,
            receives=to_gateway.MESSAGES,
            expect=worker.ref.incarnation,
        )

    def on_message(self, conn, message, payload):
        match message:
            case TokenFrame():
                self.num_frames += 1
                self.tokens.update({token.attempt: token for token in message.tokens})
            case AttemptFailed():
                self.failures[message.attempt] = message

    def on_closed(self, conn, reason):
        self.closed.set()

    def new_attempt(self) -> AttemptId:
        return AttemptId(RequestId(self.identity.incarnation, next(self._counter)), 1)

    def send(
        self,
        token_ids: Sequence[int],
        *,
        attempt: AttemptId | None = None,
        decode: WorkerRef | None = None,
        sources: tuple[BlockSource, ...] = (),
        params: SamplingParams | None = None,
        num_reusable_blocks: int | None = None,
    ) -> AttemptId:
        attempt = attempt or self.new_attempt()
        hashes = extend_block_hashes(ROOT, token_ids, BLOCK)
        self.conn.post(
            PrefillRequest(
                attempt=attempt,
                token_ids=pack_token_ids(token_ids),
                num_output_tokens=0,
                block_hashes=join_hashes(hashes),
                num_reusable_blocks=len(hashes)
                if num_reusable_blocks is None
                else num_reusable_blocks,
                params=params or SamplingParams(max_tokens=1 if decode is None else 8),
                sources=sources,
                decode=decode,
                priority=0,
            )
        )
        return attempt

    async def token(self, attempt: AttemptId) -> TokenEmitted:
        await eventually(lambda: attempt in self.tokens or attempt in self.failures)
        return self.tokens[attempt]

    async def ask(self, token_ids: Sequence[int], **more) -> TokenEmitted:
        return await self.token(self.send(token_ids, **more))


class Decode(BaseHandler):
    """Reserves every block at its pool node, and remembers what came."""

    def __init__(self, name: str, node: PoolNode) -> None:
        self.identity = identity("decode", name)
        self.node = node
        self.commits: dict[AttemptId, list[LeasedBlock]] = {}
        self.finished: dict[AttemptId, PrefillFinished] = {}
        self.gone: list[AttemptId] = []

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(
            self.identity.name, self.identity.incarnation, Address("127.0.0.1", 1), self.node.ref
        )

    async def connect(self, worker: PrefillWorker) -> None:
        self.client = await PoolClient.connect(
            self.node.socket_path,
            identity=self.identity,
            secret=SECRET,
            on_commits=lambda attempt, blocks: self.commits.setdefault(attempt, []).extend(blocks),
            on_loss=lambda attempt, handles: None,
            on_closed=lambda reason: None,
            timeout_s=5,
        )
        self.conn: Connection = await dial(
            worker.ref.address,
            self,
            identity=self.identity,
            secret=SECRET,
            sends=FROM_DECODE,
            receives=to_decode.MESSAGES,
        )

    def on_message(self, conn, message, payload):
        match message:
            case PrefillFinished():
                self.finished[message.attempt] = message
            case PrefillGone():
                self.gone.append(message.attempt)

    async def reserve(self, attempt: AttemptId, token_ids: Sequence[int]) -> list[SlotForBlock]:
        """Reserve slots for all blocks that are not at the node yet."""
        hashes = extend_block_hashes(ROOT, token_ids, BLOCK)
        private = 1 if len(token_ids) % BLOCK else 0
        outcomes = await self.client.reserve(attempt, hashes, private, ttl_s=20)
        slots = []
        for index, outcome in enumerate(outcomes):
            assert isinstance(outcome, SlotReserved | AlreadyCommitted)
            if isinstance(outcome, SlotReserved):
                slots.append(SlotForBlock(index, outcome.handle))
        return slots

    def send_slots(self, attempt: AttemptId, slots: Sequence[SlotForBlock]) -> None:
        self.conn.post(DecodeSlots(attempt, self.node.ref, tuple(slots)))

    async def blocks(self, attempt: AttemptId, slots: Sequence[SlotForBlock]) -> list[bytes]:
        """Wait until all slots are committed; return their bytes."""
        await eventually(lambda: len(self.commits.get(attempt, ())) == len(slots))
        return [bytes(self.client.slot(slot.handle)) for slot in slots]

    def release(self, attempt: AttemptId) -> None:
        self.conn.post(ReleasePrefill(attempt))
        self.client.close_transfer(attempt)

    async def close(self) -> None:
        self.conn.close()
        await self.conn.wait_closed()
        await self.client.close()


class Site:
    """Everything of one test; `close` ends it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hm"))
        self.conductor = Conductor()
        self._closers: list[Callable[[], object]] = []
        self.nodes: dict[str, PoolNode] = {}
        self.workers: dict[str, PrefillWorker] = {}
        self.engines: dict[str, GatedEngine] = {}

    async def node(self, name: str, num_slots: int = 64) -> PoolNode:
        node = PoolNode(
            PoolNodeConfig(
                num_slots=num_slots,
                slot_bytes=SPEC.block_bytes,
                num_layers=SPEC.num_layers,
                event_interval_s=0.01,
            ),
            identity=identity("pool", name),
            secret=SECRET,
            listen=ANY_PORT,
            socket_dir=self.directory,
            resolve_conductor=self.conductor.resolve,
        )
        await node.start()
        self.nodes[name] = node
        return node

    async def worker(self, name: str, pool: str, num_blocks: int = 64, **config) -> PrefillWorker:
        engine = self.engines[name] = GatedEngine(SPEC, num_blocks)
        known = self.nodes.get(pool)
        worker = PrefillWorker(
            PrefillConfig(**{"max_chunk_tokens": 64, "report_interval_s": 0.02, **config}),
            engine,
            identity=identity("prefill", name),
            secret=SECRET,
            listen=ANY_PORT,
            pool_socket=self.directory / "none" if known is None else known.socket_path,
            resolve_conductor=self.conductor.resolve,
        )
        await worker.start()
        self.workers[name] = worker
        return worker

    async def gateway(self, worker: PrefillWorker, name: str = "gateway") -> Gateway:
        gateway = Gateway(name)
        await gateway.connect(worker)
        self._closers.append(lambda: gateway.conn.close())
        return gateway

    async def decode(self, worker: PrefillWorker, node: PoolNode) -> Decode:
        decode = Decode("decode", node)
        await decode.connect(worker)
        self._closers.append(decode.close)
        return decode

    async def at_base(self) -> None:
        """Wait until no worker and no pool node holds anything for anybody."""

        def quiet() -> bool:
            pools = [node.stats() for node in self.nodes.values()]
            return all(worker.idle for worker in self.workers.values()) and not any(
                p.num_reserved + p.num_leases + p.num_quarantined + p.num_transfers for p in pools
            )

        await eventually(quiet)

    async def close(self) -> None:
        for engine in self.engines.values():
            if engine.gate is not None:
                engine.gate.release(1000)
        for closer in self._closers:
            done = closer()
            if asyncio.iscoroutine(done):
                await done
        for worker in self.workers.values():
            await worker.stop()
            if worker.failed.done() and not worker.failed.cancelled():
                worker.failed.result()
        for node in self.nodes.values():
            await node.stop()
        await self.conductor.listener.close()
        shutil.rmtree(self.directory)


def source(node: PoolNode, count: int) -> BlockSource:
    ref: PoolRef = node.ref
    return BlockSource(ref, 0, count)
