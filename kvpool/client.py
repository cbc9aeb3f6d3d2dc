"""A worker's side of the pool: its own host's node, and writers into any node.

Order of a read: `lease`, copy out of `slot`, check the block's checksum on the copy, `release`. The
lease may have run out meanwhile; the checksum on the own copy is what decides. Writes are in
`kvpool/writers.py`.

A transfer's leases and own blocks run out `ttl_s` after its last lease, reserve or fetch; slots
reserved for it that nobody began to write run out after the least of `ttl_s` and the node's
`reserve_ttl_s`. A call with no hashes renews both.

Everything here runs in the loop that called `connect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from core.errors import ConnectionLost, WireError
from core.hashing import join_hashes
from core.ids import AttemptId, BlockHash, PoolRef, SlotHandle
from core.messages import to_pool
from core.messages.to_pool import (
    BlocksLeased,
    BlocksReserved,
    CloseTransfer,
    FetchBlocks,
    LeaseBlocks,
    LeasedBlock,
    ReleaseBlocks,
    ReportCorrupt,
    ReserveBlocks,
    ReserveOutcome,
    TransferCommits,
    TransferLoss,
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
from kvpool.handover import descriptor_path, receive_segments
from kvpool.memory import Segments
from kvpool.writers import LocalSlotWriter, RemoteSlotWriter, SlotWriter

__all__ = ["LocalSlotWriter", "PoolClient", "RemoteSlotWriter", "SlotWriter"]

OnCommits = Callable[[AttemptId, tuple[LeasedBlock, ...]], None]
OnLoss = Callable[[AttemptId, tuple[SlotHandle, ...]], None]
OnClosed = Callable[[str], None]
_R = TypeVar("_R")

_MAX_FETCHES = MAX_CONCURRENT_REQUESTS // 2
"""Slow requests must leave room on the connection: the node stops reading when it is full."""


class PoolClient:
    """A worker's link to its own host's pool node; see `connect`.

    What waits raises `ConnectionLost` (the node is gone), `RemoteError` (it refused, e.g. too many
    transfers) or `TimeoutError`.
    """

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
        return (await self._ask(attempt, ask, BlocksLeased, self._timeout_s)).blocks()

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
            return (await self._ask(attempt, ask, BlocksLeased, timeout_s)).blocks()

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
