"""Writing slots of a pool node: through shared memory, or over TCP.

`begin` (the node will not reuse the slots under us), `write` layer by layer in any order, then
`commit` (the node checks the bytes and makes them visible) or `end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from core.errors import ConnectionLost, InvariantError, WireError
from core.ids import PoolRef, SlotHandle
from core.messages import to_pool
from core.messages.to_pool import (
    BeginWrites,
    BlocksCommitted,
    BlockWritten,
    CommitBlocks,
    EndWrites,
    WritesBegun,
    WriteSlices,
)
from core.net import HEARTBEAT_S, BaseHandler, Connection, Identity, dial
from kvpool.checksum import pack_checksums, slice_checksum


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
        on_closed: Callable[[str], None],
        timeout_s: float,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> RemoteSlotWriter:
        """Connect to that life of the node. Raises `ConnectionLost`, `AuthError`, `WireError`."""
        conn = await dial(
            ref.address,
            _ClosedOnly(on_closed),
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


class _ClosedOnly(BaseHandler):
    """A remote writer owns no transfer at its node, so it is told nothing else."""

    def __init__(self, on_closed: Callable[[str], None]) -> None:
        self._on_closed = on_closed

    def on_closed(self, conn: Connection, reason: str) -> None:
        self._on_closed(reason)
