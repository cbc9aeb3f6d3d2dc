"""A prefill worker's I/O with pool nodes: its own host's, and those it writes blocks to.

Every operation ends in exactly one event, within a deadline. Nodes come and go: the link to the own
node is rebuilt for ever, writers to other nodes are made when first needed and forgotten when their
connection ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from core.config import PrefillConfig
from core.errors import ConnectionLost, RemoteError, WireError
from core.ids import AttemptId, Incarnation, PoolRef
from core.links import RETRY_S
from core.messages.to_pool import LeasedBlock
from core.net import Identity
from core.transfer_meter import TransferMeter
from engine.base import Engine
from kvpool.checksum import block_checksum, slice_checksum
from kvpool.client import PoolClient, RemoteSlotWriter, SlotWriter
from prefill import events as ev

log = logging.getLogger(__name__)

_FAILURES = (ConnectionLost, RemoteError, WireError, OSError, TimeoutError)
"""What a node that dies, hangs or refuses looks like from here."""


@dataclass(slots=True)
class Traffic:
    """Bytes moved since the start, and blocks that failed their checksum here."""

    loaded_bytes: int = 0
    written_local_bytes: int = 0
    written_remote_bytes: int = 0
    num_corrupt_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Own:
    """The connection to one life of the host's node."""

    client: PoolClient
    writer: SlotWriter


class PoolLink:
    """Does what `ev.PoolAction`s ask for. Everything runs in the loop; only copies leave it."""

    def __init__(
        self,
        config: PrefillConfig,
        engine: Engine,
        *,
        identity: Identity,
        secret: bytes,
        socket_path: Path,
        on_change: Callable[[PoolRef | None], None],
        heartbeat_s: float,
    ) -> None:
        self.traffic = Traffic()
        self.transfers = TransferMeter()
        self._config, self._engine = config, engine
        self._identity, self._secret = identity, secret
        self._socket_path = socket_path
        self._on_change = on_change
        self._heartbeat_s = heartbeat_s
        self._own: _Own | None = None
        self._lost = asyncio.Event()
        self._writers: dict[Incarnation, asyncio.Task[RemoteSlotWriter]] = {}
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="prefill-load")

    # --- the own node ---

    async def connect(self) -> bool:
        """Try once to reach the own node."""
        lost = asyncio.Event()
        try:
            client = await PoolClient.connect(
                self._socket_path,
                identity=self._identity,
                secret=self._secret,
                on_commits=_ignore,  # our own writes' outcomes come as replies
                on_loss=_ignore,
                on_closed=lambda reason: lost.set(),
                timeout_s=self._config.load_timeout_s,
                heartbeat_s=self._heartbeat_s,
            )
        except _FAILURES as error:
            log.info("%s: no pool node yet: %s", self._identity.name, error)
            return False
        self._own, self._lost = _Own(client, client.writer()), lost
        self._on_change(client.ref)
        return True

    async def run(self) -> None:
        """Stay connected until cancelled."""
        failures = 0
        while True:
            if self._own is None and not await self.connect():
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            await self._lost.wait()
            await self._drop_own()

    async def _drop_own(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._on_change(None)
            await own.client.close()

    async def close(self) -> None:
        """End every connection; what still waits fails at once."""
        await self._drop_own()
        for task in self._writers.values():
            task.cancel()
        for made in await asyncio.gather(*self._writers.values(), return_exceptions=True):
            if isinstance(made, RemoteSlotWriter):
                made.close()
        self._copier.shutdown(wait=False)

    # --- operations ---

    async def perform(self, action: ev.PoolAction) -> ev.Event:
        """Do it; return the event that answers it."""
        match action:
            case ev.LeasePrefix() | ev.FetchPrefix():
                return await self._find(action)
            case ev.LoadBlocks():
                return await self._load(action)
            case ev.ReserveOwnSlots():
                return await self._reserve(action)
            case ev.BeginWrites() | ev.WriteBlocks() | ev.CommitBlocks():
                return await self._write(action)
            case _:
                assert_never(action)

    async def _find(self, action: ev.LeasePrefix | ev.FetchPrefix) -> ev.Event:
        wait_s = self._config.load_timeout_s
        try:
            client = self._client()
            if isinstance(action, ev.LeasePrefix):
                blocks = await client.lease(action.attempt, action.block_hashes, ttl_s=2 * wait_s)
                return ev.PrefixLeased(action.attempt, blocks)
            blocks = await client.fetch(
                action.attempt,
                action.source,
                action.block_hashes,
                ttl_s=2 * wait_s,
                deadline_s=wait_s,
            )
            return ev.PrefixFetched(action.attempt, blocks)
        except _FAILURES as error:
            log.info("%s: no prefix from the pool: %s", action.attempt, error)
            return ev.PrefixUnavailable(action.attempt)

    async def _reserve(self, action: ev.ReserveOwnSlots) -> ev.Event:
        try:
            client = self._client()
            outcomes = await client.reserve(
                action.attempt, action.block_hashes, 0, ttl_s=self._config.handoff_timeout_s
            )
            return ev.SlotsReserved(action.attempt, client.ref, outcomes)
        except _FAILURES as error:
            log.info("%s: nothing is published: %s", action.attempt, error)
            return ev.ReservationFailed(action.attempt)

    async def _load(self, action: ev.LoadBlocks) -> ev.Event:
        num_good = 0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            client = self._client()
            for leased, block_id in zip(action.blocks, action.block_ids, strict=True):
                view = client.slot(leased.handle)
                if not await loop.run_in_executor(self._copier, self._copy, view, leased, block_id):
                    self.traffic.num_corrupt_blocks += 1
                    client.report_corrupt(leased.handle)
                    break
                num_good += 1
            num_bytes = num_good * self._engine.spec.block_bytes
            took_s = loop.time() - began_s
            self.transfers.add(client.ref.name, self._identity.name, num_bytes, took_s)
            client.release(action.attempt, [leased.handle for leased in action.blocks])
        except _FAILURES as error:
            log.info("%s: the pool node left in the middle of a load: %s", action.attempt, error)
        self.traffic.loaded_bytes += num_good * self._engine.spec.block_bytes
        if num_good == len(action.blocks):
            return ev.PrefixBlocksLoaded(action.attempt)
        return ev.PrefixBlockBroken(action.attempt, num_good)

    def _copy(self, view: memoryview, leased: LeasedBlock, block_id: int) -> bool:
        """Copy into the paged cache and check the copy: what counts is what the engine reads."""
        spec = self._engine.spec
        self._engine.write_block(block_id, view[: spec.block_bytes])
        slices = [self._engine.read_slice(block_id, i) for i in range(spec.num_layers)]
        return block_checksum([slice_checksum(data) for data in slices]) == leased.checksum

    async def _write(self, action: ev.BeginWrites | ev.WriteBlocks | ev.CommitBlocks) -> ev.Event:
        attempt, pool = action.attempt, action.pool.incarnation
        writer: SlotWriter | None = None
        try:
            async with asyncio.timeout(self._config.handoff_timeout_s):
                writer = await self._writer(action.pool)
                match action:
                    case ev.BeginWrites():
                        return ev.WritesBegun(attempt, pool, await writer.begin(action.handles))
                    case ev.CommitBlocks():
                        accepted = await writer.commit(action.handles)
                        return ev.BlocksCommitted(attempt, pool, accepted)
                    case ev.WriteBlocks():
                        await self._write_slices(writer, action)
                        return ev.SlicesWritten(attempt, pool)
        except _FAILURES as error:
            log.info("%s: cannot write to pool node %s: %s", attempt, action.pool.name, error)
            # Nothing of ours may still be on its way when the blocks are given to somebody else.
            if writer is not None:
                self._abandon(pool, writer)
            return ev.WritesFailed(attempt, pool)

    async def _write_slices(self, writer: SlotWriter, action: ev.WriteBlocks) -> None:
        size = self._engine.spec.layer_slice_bytes
        for part in action.slices:
            data = [self._engine.read_slice(block, part.layer) for block in part.block_ids]
            began_s = asyncio.get_running_loop().time()
            await writer.write(part.layer, part.handles, data)
            took_s = asyncio.get_running_loop().time() - began_s
            own, num_bytes = self._identity.name, size * len(data)
            self.transfers.add(own, action.pool.name, num_bytes, took_s)
            if isinstance(writer, RemoteSlotWriter):
                self.traffic.written_remote_bytes += size * len(data)
            else:
                self.traffic.written_local_bytes += size * len(data)
                await asyncio.sleep(0)  # a copy in memory does not let others run by itself

    def end_writes(self, action: ev.EndWrites) -> None:
        """Let go of slots; nothing to do when their node is gone."""
        task = self._writers.get(action.pool.incarnation)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            task.result().end(action.handles)
        elif self._own is not None and self._is_own(action.pool):
            self._own.writer.end(action.handles)

    def _is_own(self, pool: PoolRef) -> bool:
        return self._own is not None and self._own.client.ref.incarnation == pool.incarnation

    def close_transfer(self, attempt: AttemptId) -> None:
        """Give everything of the attempt back to the own node, if there is one."""
        if self._own is not None:
            self._own.client.close_transfer(attempt)

    def _client(self) -> PoolClient:
        if self._own is None:
            raise ConnectionLost("this host has no pool node")
        return self._own.client

    # --- writers ---

    async def _writer(self, pool: PoolRef) -> SlotWriter:
        """Return the writer into that life of a node. Raises one of `_FAILURES`."""
        task = self._writers.get(pool.incarnation)
        if task is None and self._is_own(pool):
            assert self._own is not None
            return self._own.writer
        # A writer over TCP stays in use when the own link to the same node comes up afterwards:
        # writes have begun there and only there.
        if task is None:
            task = asyncio.create_task(self._connect_writer(pool))
            self._writers[pool.incarnation] = task
        try:
            return await asyncio.shield(task)
        except _FAILURES:
            self._forget_writer(pool.incarnation, task)
            raise

    async def _connect_writer(self, pool: PoolRef) -> RemoteSlotWriter:
        task = asyncio.current_task()
        return await RemoteSlotWriter.connect(
            pool,
            identity=self._identity,
            secret=self._secret,
            on_closed=lambda reason: self._forget_writer(pool.incarnation, task),
            timeout_s=self._config.load_timeout_s,
            heartbeat_s=self._heartbeat_s,
        )

    def _forget_writer(self, pool: Incarnation, task: object) -> None:
        if self._writers.get(pool) is task:
            del self._writers[pool]

    def _abandon(self, pool: Incarnation, writer: SlotWriter) -> None:
        """Close the writer's connection, so that a node that hangs gets no late byte."""
        if self._own is not None and self._own.writer is writer:
            self._lost.set()
            return
        self._writers.pop(pool, None)
        writer.close()


def _ignore(*_: object) -> None:
    """Take a notice that is of no use here."""
