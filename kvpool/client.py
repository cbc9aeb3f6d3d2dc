"""A worker's side of the pool: its own host's node, and writers into any node.

Order of a write: `begin` (the node will not reuse the slots under us), `write` layer by layer,
`commit` (the node checks the bytes and makes them visible) or `end`. Order of a read: `lease`,
copy out of `slot`, check the block's checksum on the copy, `release`. The lease may have run out
meanwhile; the checksum on the own copy is what decides.

Everything here runs in the loop that called `connect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from core.errors import ConnectionLost, InvariantError, WireError
from core.hashing import join_hashes
from core.ids import AttemptId, BlockHash, PoolRef, SlotHandle
from core.messages import to_pool
from core.messages.to_pool import (
    BeginWrites,
    BlocksCommitted,
    BlocksLeased,
    BlocksReserved,
    BlockWritten,
    CloseTransfer,
    CommitBlocks,
    EndWrites,
    FetchBlocks,
    LeaseBlocks,
    LeasedBlock,
    ReleaseBlocks,
    ReportCorrupt,
    ReserveBlocks,
    ReserveOutcome,
    TransferCommits,
    TransferLoss,
    WritesBegun,
    WriteSlices,
)
from core.net import (
    HEARTBEAT_S,
    MAX_CONCURRENT_REQUESTS,
    BaseHandler,
    Connection,
    Identity,
    UnixEndpoint,
    dial,
)
from core.wire import Message
from kvpool.checksum import pack_checksums, slice_checksum
from kvpool.handover import descriptor_path, receive_segments
from kvpool.memory import Segments

OnCommits = Callable[[AttemptId, tuple[LeasedBlock, ...]], None]
OnLoss = Callable[[AttemptId, tuple[SlotHandle, ...]], None]
OnClosed = Callable[[str], None]
_R = TypeVar("_R")

_MAX_FETCHES = MAX_CONCURRENT_REQUESTS // 2
"""Slow requests must leave room on the connection: the node stops reading when it is full."""


class SlotWriter(Protocol):
    """Writes slots of one pool node; `LocalSlotWriter` and `RemoteSlotWriter` look the same.

    Every method that waits raises `ConnectionLost` when the node is gone and `TimeoutError` when
    it does not answer.
    """

    async def begin(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        """Ask to write; `False` for a slot that is not reserved (any more) or has a writer."""
        ...

    async def write(
        self, layer: int, handles: Sequence[SlotHandle], slices: Sequence[memoryview]
    ) -> None:
        """Write one layer: slice i into `handles[i]`. The slices may be reused on return.

        Slices for handles that `begin` refused are dropped.
        """
        ...

    async def commit(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        """Publish slots whose every layer is written; `False` when refused. Ends the writes."""
        ...

    def end(self, handles: Sequence[SlotHandle]) -> None:
        """Give slots up without commit; never raises when the node is gone."""
        ...

    def close(self) -> None:
        """Give up every slot still open."""
        ...


class PoolClient:
    """A worker's link to its own host's pool node; see `connect`."""

    def __init__(
        self, conn: Connection, ref: PoolRef, segments: Segments, timeout_s: float
    ) -> None:
        self.ref = ref
        self._conn = conn
        self._segments = segments
        self._timeout_s = timeout_s
        self._in_flight: dict[AttemptId, int] = {}
        self._closing: set[AttemptId] = set()
        self._fetch_turns = asyncio.Semaphore(_MAX_FETCHES)
        self._tasks: set[asyncio.Task[Message]] = set()

    @classmethod
    async def connect(
        cls,
        socket_path: Path,
        *,
        identity: Identity,
        secret: bytes,
        on_commits: OnCommits,
        on_loss: OnLoss,
        on_closed: OnClosed,
        timeout_s: float,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> PoolClient:
        """Connect to the node at `socket_path` and map its memory.

        `on_commits` and `on_loss` tell of reserved slots (also those this worker itself wrote);
        `on_closed` comes once when the connection ends for any reason. `timeout_s` bounds
        connecting and each later answer. Raises `ConnectionLost`, `AuthError`, `WireError`.
        """
        ref, segments = await asyncio.to_thread(
            receive_segments, descriptor_path(socket_path), timeout_s
        )
        conn = await dial(
            UnixEndpoint(socket_path),
            _Notices(on_commits, on_loss, on_closed),
            identity=identity,
            secret=secret,
            sends=to_pool.MESSAGES,
            receives=to_pool.REPLIES,
            expect=ref.incarnation,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
        )
        return cls(conn, ref, segments, timeout_s)

    async def lease(
        self, attempt: AttemptId, block_hashes: Sequence[BlockHash], *, ttl_s: float
    ) -> tuple[LeasedBlock, ...]:
        """Lease the longest committed prefix of `block_hashes` for `ttl_s`; renews the transfer."""
        ask = LeaseBlocks(attempt, join_hashes(block_hashes), ttl_s)
        return (await self._ask(attempt, ask, BlocksLeased, self._timeout_s)).blocks

    async def reserve(
        self,
        attempt: AttemptId,
        block_hashes: Sequence[BlockHash],
        num_private: int,
        *,
        ttl_s: float,
    ) -> tuple[ReserveOutcome, ...]:
        """Reserve slots: one outcome per hash, then per private slot (see `ReserveBlocks`)."""
        ask = ReserveBlocks(attempt, join_hashes(block_hashes), num_private, ttl_s)
        return (await self._ask(attempt, ask, BlocksReserved, self._timeout_s)).outcomes

    async def fetch(
        self,
        attempt: AttemptId,
        source: PoolRef,
        block_hashes: Sequence[BlockHash],
        *,
        ttl_s: float,
        deadline_s: float,
    ) -> tuple[LeasedBlock, ...]:
        """Bring blocks here from `source`; lease the longest prefix that is here afterwards.

        `deadline_s` bounds each piece of the way, so a slow link that moves is no failure.
        """
        ask = FetchBlocks(attempt, source, join_hashes(block_hashes), ttl_s, deadline_s)
        # The node bounds each batch (at least a block) by the deadline; this is only its backstop.
        timeout_s = self._timeout_s + deadline_s * (len(block_hashes) + 2)
        async with self._fetch_turns:
            return (await self._ask(attempt, ask, BlocksLeased, timeout_s)).blocks

    async def _ask(
        self, attempt: AttemptId, ask: Message, expected: type[_R], timeout_s: float
    ) -> _R:
        """Ask in a task of its own: a caller that is cancelled must not hide what it still got."""
        self._in_flight[attempt] = self._in_flight.get(attempt, 0) + 1
        task = asyncio.ensure_future(self._answer(attempt, ask, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        reply = await asyncio.shield(task)
        if not isinstance(reply, expected):
            raise WireError(f"expected {expected.__name__}, got {type(reply).__name__}")
        return reply

    async def _answer(self, attempt: AttemptId, ask: Message, timeout_s: float) -> Message:
        try:
            reply, _ = await self._conn.request(ask, timeout_s=timeout_s)
            return reply
        finally:
            self._in_flight[attempt] -= 1
            if not self._in_flight[attempt]:
                del self._in_flight[attempt]
                if attempt in self._closing:
                    self._closing.discard(attempt)
                    self._post(CloseTransfer(attempt))

    def _forget(self, task: asyncio.Task[Message]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have left

    def release(self, attempt: AttemptId, handles: Sequence[SlotHandle]) -> None:
        """Give leases of the transfer back early; never raises when the node is gone."""
        self._post(ReleaseBlocks(attempt, tuple(handles)))

    def close_transfer(self, attempt: AttemptId) -> None:
        """Give back everything of the transfer; never raises when the node is gone.

        What a request still in flight brings is given back too.
        """
        if attempt in self._in_flight:
            self._closing.add(attempt)
        self._post(CloseTransfer(attempt))

    def report_corrupt(self, handle: SlotHandle) -> None:
        """Tell that a committed block failed its checksum on our copy."""
        self._post(ReportCorrupt(handle))

    def _post(self, message: Message) -> None:
        if not self._conn.closed:  # otherwise the loss gave everything back already
            try:
                self._conn.post(message)
            except ConnectionLost:
                return

    def slot(self, handle: SlotHandle) -> memoryview:
        """Return the whole slot in shared memory; the view stays valid as memory for ever.

        Raises `ConnectionLost` when the node's life or the slot's use that `handle` names is
        over, `WireError` when there is no such slot.
        """
        return self._segments.slot(self._checked_index(handle))

    def _checked_index(self, handle: SlotHandle) -> int:
        if handle.incarnation != self.ref.incarnation or self._conn.closed:
            raise ConnectionLost(f"pool node {self.ref.name}/{handle.incarnation} is gone")
        index = self._segments.layout.index(handle)
        if self._segments.generations[index] != handle.generation:
            raise ConnectionLost(f"{handle} was taken for another use")
        return index

    def writer(self) -> SlotWriter:
        """Return a writer through shared memory."""
        return LocalSlotWriter(self._conn, self._slice, self._timeout_s)

    def _slice(self, handle: SlotHandle, layer: int) -> memoryview:
        return self._segments.slice(self._checked_index(handle), layer)

    async def close(self) -> None:
        """End the connection; the node gives back everything of this worker.

        Views of slots stay valid as memory. Call it also after `on_closed`, to unmap the rest.
        """
        self._conn.close()
        await self._conn.wait_closed()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._segments.close()


class LocalSlotWriter:
    """Writes slots of the own host's node in place."""

    def __init__(
        self,
        conn: Connection,
        slice_of: Callable[[SlotHandle, int], memoryview],
        timeout_s: float,
    ) -> None:
        self._slice_of = slice_of
        self._ledger = _WriteLedger(conn, timeout_s)

    async def begin(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        """See `SlotWriter`."""
        return await self._ledger.begin(handles)

    async def write(
        self, layer: int, handles: Sequence[SlotHandle], slices: Sequence[memoryview]
    ) -> None:
        """See `SlotWriter`. Raises `WireError` for a layer or slice that does not fit."""
        for handle, data in self._ledger.select(handles, slices):
            target = self._slice_of(handle, layer)
            if data.nbytes != target.nbytes:
                raise WireError(f"{data.nbytes} bytes are no slice of {target.nbytes}")
            target[:] = data
            self._ledger.record(layer, handle, slice_checksum(data))

    async def commit(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        """See `SlotWriter`."""
        return await self._ledger.commit(handles)

    def end(self, handles: Sequence[SlotHandle]) -> None:
        """See `SlotWriter`."""
        self._ledger.end(handles)

    def close(self) -> None:
        """See `SlotWriter`."""
        self._ledger.end_all()


class RemoteSlotWriter:
    """Writes slots of another host's node over TCP, on a connection of its own."""

    def __init__(self, conn: Connection, ref: PoolRef, timeout_s: float) -> None:
        self.ref = ref
        self._conn = conn
        self._ledger = _WriteLedger(conn, timeout_s)

    @classmethod
    async def connect(
        cls,
        ref: PoolRef,
        *,
        identity: Identity,
        secret: bytes,
        on_closed: OnClosed,
        timeout_s: float,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> RemoteSlotWriter:
        """Connect to that life of the node. Raises `ConnectionLost`, `AuthError`, `WireError`."""
        conn = await dial(
            ref.address,
            _Notices(_ignore_commits, _ignore_loss, on_closed),
            identity=identity,
            secret=secret,
            sends=to_pool.MESSAGES,
            receives=to_pool.REPLIES,
            expect=ref.incarnation,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
        )
        return cls(conn, ref, timeout_s)

    async def begin(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        """See `SlotWriter`."""
        return await self._ledger.begin(handles)

    async def write(
        self, layer: int, handles: Sequence[SlotHandle], slices: Sequence[memoryview]
    ) -> None:
        """See `SlotWriter`. Returns when the kernel has the bytes, so it follows a slow link."""
        chosen = self._ledger.select(handles, slices)
        if not chosen:
            return
        checksums = tuple(slice_checksum(data) for _, data in chosen)
        for (handle, _), checksum in zip(chosen, checksums, strict=True):
            self._ledger.record(layer, handle, checksum)
        message = WriteSlices(layer, tuple(h for h, _ in chosen), checksums)
        await self._conn.send(message, [data for _, data in chosen])

    async def commit(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        """See `SlotWriter`."""
        return await self._ledger.commit(handles)

    def end(self, handles: Sequence[SlotHandle]) -> None:
        """See `SlotWriter`."""
        self._ledger.end(handles)

    def close(self) -> None:
        """See `SlotWriter`. Ends the connection."""
        self._conn.close()


class _WriteLedger:
    """What a writer has begun, and the checksums of what it wrote there."""

    def __init__(self, conn: Connection, timeout_s: float) -> None:
        self._conn = conn
        self._timeout_s = timeout_s
        self._open: dict[SlotHandle, dict[int, int]] = {}

    async def begin(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        # Shielded: the node may have accepted what a cancelled caller will never end.
        task = asyncio.ensure_future(self._begin(tuple(handles)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._end_begun(handles, done))
            raise

    def _end_begun(
        self, handles: Sequence[SlotHandle], task: asyncio.Task[tuple[bool, ...]]
    ) -> None:
        if not task.cancelled() and task.exception() is None:
            self.end(handles)

    async def _begin(self, handles: tuple[SlotHandle, ...]) -> tuple[bool, ...]:
        try:
            reply, _ = await self._conn.request(BeginWrites(handles), timeout_s=self._timeout_s)
        except TimeoutError:
            # Whether the slots are ours to end is unknown; without the connection they are not.
            self._conn.close("no answer to BeginWrites")
            raise
        if not isinstance(reply, WritesBegun) or len(reply.accepted) != len(handles):
            raise WireError("expected WritesBegun with an answer for each handle")
        for handle, accepted in zip(handles, reply.accepted, strict=True):
            if accepted:
                self._open.setdefault(handle, {})
        return reply.accepted

    def select(
        self, handles: Sequence[SlotHandle], slices: Sequence[memoryview]
    ) -> list[tuple[SlotHandle, memoryview]]:
        """Return what may be written, slices as bytes."""
        return [
            (handle, data.cast("B"))
            for handle, data in zip(handles, slices, strict=True)
            if handle in self._open
        ]

    def record(self, layer: int, handle: SlotHandle, checksum: int) -> None:
        # The slot may have been ended while its slice was on the way.
        if (layers := self._open.get(handle)) is not None:
            layers[layer] = checksum

    async def commit(self, handles: Sequence[SlotHandle]) -> tuple[bool, ...]:
        written = {}
        for handle in handles:
            layers = self._open.get(handle)
            if layers is None:
                continue
            if sorted(layers) != list(range(len(layers))) or not layers:
                raise InvariantError(f"commit of {handle} with layers {sorted(layers)} written")
            written[handle] = pack_checksums([layers[i] for i in range(len(layers))])
        if not written:
            return (False,) * len(handles)
        for handle in written:
            del self._open[handle]
        ask = CommitBlocks(tuple(BlockWritten(h, raw) for h, raw in written.items()))
        reply, _ = await self._conn.request(ask, timeout_s=self._timeout_s)
        if not isinstance(reply, BlocksCommitted) or len(reply.accepted) != len(written):
            raise WireError("expected BlocksCommitted with an answer for each block")
        committed = dict(zip(written, reply.accepted, strict=True))
        return tuple(committed.get(handle, False) for handle in handles)

    def end(self, handles: Sequence[SlotHandle]) -> None:
        ended = tuple(h for h in handles if self._open.pop(h, None) is not None)
        if ended and not self._conn.closed:
            try:
                self._conn.post(EndWrites(ended))
            except ConnectionLost:
                return

    def end_all(self) -> None:
        self.end(tuple(self._open))


class _Notices(BaseHandler):
    """Passes on what a node tells unasked."""

    def __init__(self, on_commits: OnCommits, on_loss: OnLoss, on_closed: OnClosed) -> None:
        self._on_commits, self._on_loss, self._on_closed = on_commits, on_loss, on_closed

    def on_message(self, conn: Connection, message: Message, payload: bytes | None) -> None:
        match message:
            case TransferCommits(attempt, blocks):
                self._on_commits(attempt, blocks)
            case TransferLoss(attempt, handles):
                self._on_loss(attempt, handles)
            case _:
                super().on_message(conn, message, payload)

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._on_closed(reason)


def _ignore_commits(attempt: AttemptId, blocks: tuple[LeasedBlock, ...]) -> None:
    """Take no notice: a remote writer owns no transfer at that node."""


def _ignore_loss(attempt: AttemptId, handles: tuple[SlotHandle, ...]) -> None:
    """Take no notice: a remote writer owns no transfer at that node."""
