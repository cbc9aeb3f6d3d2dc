"""Real sockets around a `DecodeWorker`: a real pool node; a gateway, a prefill worker and a
Conductor that do what the tests tell them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from core.batching import ChunkBatcher
from core.config import DecodeConfig, PoolNodeConfig
from core.errors import HalfmoonError
from core.hashing import unpack_token_ids
from core.ids import Address, AttemptId, BlockHash, Incarnation, RequestId, WorkerRef
from core.messages import to_conductor, to_decode, to_gateway, to_prefill
from core.messages.to_conductor import Registered, RegisterWorker, WorkerReport
from core.messages.to_decode import CancelDecode, DecodeRequest, PrefillFinished
from core.messages.to_gateway import AttemptFailed, TokenEmitted, TokenFrame
from core.messages.to_pool import SlotReserved
from core.messages.to_prefill import DecodeSlots, ReleasePrefill
from core.net import BaseHandler, Connection, Identity, Listener, dial, listen
from core.requests import SamplingParams
from decode.worker import DecodeWorker
from engine.toy import ToyEngine, toy_generate
from kvpool.client import PoolClient
from kvpool.node import PoolNode
from kvpool.writers import RemoteSlotWriter
from tests.decode.world import SPEC, compute_blocks, make_request

SECRET = b"s" * 32
ANY_PORT = Address("127.0.0.1", 0)
TIMEOUT_S = 30.0

_lives = itertools.count(1)


def identity(kind: str, name: str) -> Identity:
    return Identity(kind, name, Incarnation(f"{name}-{next(_lives)}"))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


class FakeConductor(BaseHandler):
    def __init__(self) -> None:
        self.registrations: list[RegisterWorker] = []
        self.reports: list[WorkerReport] = []
        self.listener: Listener | None = None

    async def start(self) -> None:
        self.listener = await listen(
            ANY_PORT,
            self,
            identity=identity("conductor", "conductor"),
            secret=SECRET,
            sets=lambda kind: (to_conductor.MESSAGES, to_conductor.REPLIES),
        )

    async def resolve(self) -> Address:
        assert self.listener is not None and isinstance(self.listener.endpoint, Address)
        return self.listener.endpoint

    async def on_request(self, conn, message):
        if isinstance(message, RegisterWorker):
            self.registrations.append(message)
        return Registered(1)

    def on_message(self, conn, message, payload):
        if isinstance(message, WorkerReport):
            self.reports.append(message)


class FakePrefill(BaseHandler):
    """Writes the right blocks into the slots it is told, and then sends the first token.

    Before each of `write` and `finish` it waits for the event of that name.
    """

    def __init__(self, pool: PoolNode) -> None:
        self.identity = identity("prefill", "p0")
        self.pool = pool
        self.prompts: dict[RequestId, tuple[list[int], SamplingParams]] = {}
        self.requests: dict[AttemptId, DecodeRequest] = {}
        self.slots: list[DecodeSlots] = []
        self.released: list[AttemptId] = []
        self.finished: set[AttemptId] = set()
        self.write, self.finish = asyncio.Event(), asyncio.Event()
        self.write.set()
        self.finish.set()
        self.connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.listener = await listen(
            ANY_PORT,
            self,
            identity=self.identity,
            secret=SECRET,
            sets=lambda kind: (to_prefill.MESSAGES, to_decode.MESSAGES),
        )
        assert isinstance(self.listener.endpoint, Address)
        self.ref = WorkerRef("p0", self.identity.incarnation, self.listener.endpoint, self.pool.ref)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.listener.close()

    def on_message(self, conn, message, payload):
        self.connections.add(conn)
        match message:
            case DecodeSlots():
                self.slots.append(message)
                task = asyncio.create_task(self._serve(conn, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case ReleasePrefill(attempt=attempt):
                self.released.append(attempt)

    async def _serve(self, conn: Connection, message: DecodeSlots) -> None:
        tokens = list(unpack_token_ids(self.requests[message.attempt].token_ids))
        await self.write.wait()
        with contextlib.suppress(HalfmoonError, TimeoutError):
            if message.slots:
                await self._write(message, compute_blocks(tokens))
            await self.finish.wait()
            self.finished.add(message.attempt)
            conn.post(self.first_token(message.attempt))

    def first_token(self, attempt: AttemptId) -> PrefillFinished:
        number = self.requests[attempt].num_output_tokens
        outputs = toy_generate(*self.prompts[attempt.request], SPEC)
        return PrefillFinished(attempt, outputs[number], finished=number + 1 == len(outputs))

    async def _write(self, message: DecodeSlots, blocks: list[bytes]) -> None:
        writer = await RemoteSlotWriter.connect(
            message.pool,
            identity=self.identity,
            secret=SECRET,
            on_closed=lambda reason: None,
            timeout_s=TIMEOUT_S,
        )
        try:
            handles = [slot.handle for slot in message.slots]
            await writer.begin(handles)
            size = SPEC.layer_slice_bytes
            for layer in range(SPEC.num_layers):
                part = slice(layer * size, (layer + 1) * size)
                slices = [memoryview(blocks[slot.index])[part] for slot in message.slots]
                await writer.write(layer, handles, slices)
            await writer.commit(handles)
        finally:
            writer.close()


class FakeGateway(BaseHandler):
    """Sends requests to one worker and keeps what comes back."""

    def __init__(self, on_failure: Callable[[AttemptFailed], None]) -> None:
        self.on_failure = on_failure
        self.identity = identity("gateway", "gateway")
        self.tokens: dict[RequestId, list[TokenEmitted]] = {}
        self.frames: list[TokenFrame] = []
        self.failures: list[AttemptFailed] = []
        self.conn: Connection | None = None

    async def connect(self, worker: DecodeWorker) -> None:
        self.conn = await dial(
            worker.ref.address,
            self,
            identity=self.identity,
            secret=SECRET,
            sends=to_decode.MESSAGES,
            receives=to_gateway.MESSAGES,
        )

    def on_message(self, conn, message, payload):
        match message:
            case TokenFrame(tokens=tokens):
                self.frames.append(message)
                for token in tokens:
                    self.tokens.setdefault(token.attempt.request, []).append(token)
            case AttemptFailed():
                self.failures.append(message)
                self.on_failure(message)

    def post(self, message: DecodeRequest | CancelDecode) -> None:
        assert self.conn is not None
        self.conn.post(message)

    def ids(self, request: RequestId) -> list[int]:
        return [token.token_id for token in self.tokens.get(request, [])]

    async def finished(self, request: RequestId) -> None:
        await eventually(lambda: any(t.finish is not None for t in self.tokens.get(request, [])))


class Parts:
    """Everything started; `ask` sends a request whose prefill is this prefill worker's."""

    pool: PoolNode
    prefill: FakePrefill
    worker: DecodeWorker

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conductor = FakeConductor()
        self.gateway = FakeGateway(self._place_again)
        self.resubmit = False
        self._counter = itertools.count(1)

    async def start_pool(self) -> None:
        self.pool = await self.start_pool_node("n0")

    async def start_pool_node(self, name: str) -> PoolNode:
        node = PoolNode(
            PoolNodeConfig(256, SPEC.block_bytes, SPEC.num_layers),
            identity=identity("pool", name),
            secret=SECRET,
            listen=ANY_PORT,
            socket_dir=self.directory,
            resolve_conductor=self.conductor.resolve,
        )
        await node.start()
        return node

    def request(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        outputs: list[int] | None = None,
        counter: int | None = None,
        attempt: int = 1,
        coupled: bool = False,
    ) -> DecodeRequest:
        message = make_request(
            prompt,
            outputs or [],
            sampling,
            counter=next(self._counter) if counter is None else counter,
            attempt=attempt,
            gateway=self.gateway.identity.incarnation,
            prefill=None if coupled else self.prefill.ref,
        )
        self.prefill.prompts[message.attempt.request] = (prompt, sampling)
        self.prefill.requests[message.attempt] = message
        return message

    def ask(self, prompt: list[int], sampling: SamplingParams, **more) -> RequestId:
        message = self.request(prompt, sampling, **more)
        self.gateway.post(message)
        return message.attempt.request

    def _place_again(self, failure: AttemptFailed) -> None:
        if self.resubmit:
            request = failure.attempt.request
            self.ask(
                *self.prefill.prompts[request],
                outputs=self.merged(request),
                counter=request.counter,
                attempt=failure.attempt.attempt + 1,
            )

    def merged(self, request: RequestId) -> list[int]:
        """All outputs of a request: the first of each attempt came from prefill."""
        outputs = {t.seq: t.token_id for t in self.gateway.tokens.get(request, [])}
        for attempt in self.prefill.finished:
            if attempt.request == request:
                number = self.prefill.requests[attempt].num_output_tokens
                outputs[number] = self.prefill.first_token(attempt).token_id
        return [outputs[i] for i in range(len(outputs))]

    async def at_base(self) -> None:
        """Wait until worker and pool hold nothing for anybody."""
        gauges = ("requests_running", "requests_waiting", "requests_ending", "kv_blocks_in_use")
        await eventually(lambda: not any(self.worker.stats()[name] for name in gauges))
        self.worker.state.validate()
        await eventually(lambda: self.pool_holds() == 0)

    def pool_holds(self) -> int:
        stats = self.pool.stats()
        return stats.num_reserved + stats.num_leases + stats.num_transfers + stats.num_quarantined

    async def pool_client(self, node: PoolNode | None = None) -> PoolClient:
        return await PoolClient.connect(
            (node or self.pool).socket_path,
            identity=identity("decode", "reader"),
            secret=SECRET,
            on_commits=lambda attempt, blocks: None,
            on_loss=lambda attempt, handles: None,
            on_closed=lambda reason: None,
            timeout_s=TIMEOUT_S,
        )


async def put_blocks(client: PoolClient, hashes: list[BlockHash], blocks: list[bytes]) -> None:
    """Commit blocks to a pool node, as a prefill worker does that publishes them."""
    transfer = AttemptId(RequestId(Incarnation("publisher"), 1), 1)
    outcomes = await client.reserve(transfer, hashes, 0, ttl_s=TIMEOUT_S)
    handles = [outcome.handle for outcome in outcomes if isinstance(outcome, SlotReserved)]
    writer = client.writer()
    await writer.begin(handles)
    size = SPEC.layer_slice_bytes
    for layer in range(SPEC.num_layers):
        part = slice(layer * size, (layer + 1) * size)
        await writer.write(layer, handles, [memoryview(block)[part] for block in blocks])
    assert all(await writer.commit(handles))
    client.close_transfer(transfer)


@contextlib.asynccontextmanager
async def running_parts(
    directory: Path,
    *,
    num_blocks: int = 64,
    config: DecodeConfig | None = None,
    coupled: ChunkBatcher | None = None,
    engine: ToyEngine | None = None,
) -> AsyncIterator[Parts]:
    """Start a worker and its surroundings; stop them at the end, in order."""
    parts = Parts(directory)
    await parts.conductor.start()
    await parts.start_pool()
    parts.prefill = FakePrefill(parts.pool)
    await parts.prefill.start()
    parts.worker = DecodeWorker(
        config or DecodeConfig(report_interval_s=0.02),
        engine or ToyEngine(SPEC, num_blocks),
        identity=identity("decode", "d0"),
        secret=SECRET,
        listen=ANY_PORT,
        pool_socket=parts.pool.socket_path,
        resolve_conductor=parts.conductor.resolve,
        coupled=coupled,
    )
    await parts.worker.start()
    await parts.gateway.connect(parts.worker)
    try:
        yield parts
    finally:
        if parts.gateway.conn is not None:
            parts.gateway.conn.close()
            await parts.gateway.conn.wait_closed()
        await parts.worker.stop()
        await parts.prefill.stop()
        await parts.pool.stop()
        assert parts.conductor.listener is not None
        await parts.conductor.listener.close()
