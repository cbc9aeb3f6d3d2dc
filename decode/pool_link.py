"""A decode worker's dealings with its host's pool node, whichever life of it is running.

Every method that carries out an action returns the one event that is its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from core.errors import ConnectionLost, HalfmoonError
from core.ids import AttemptId, RequestId, SlotHandle
from core.messages.to_pool import LeasedBlock, SlotReserved
from core.net import Identity
from core.transfer_meter import TransferMeter
from decode import events as ev
from engine.base import Engine
from kvpool.checksum import block_checksum, slice_checksum
from kvpool.client import PoolClient
from kvpool.writers import SlotWriter

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 0.1

LEASE_TTL_S = 300.0
"""Transfers are closed by their end or by the loss of the connection; this is the backstop."""

_UNREACHABLE = (HalfmoonError, TimeoutError, OSError)


class PoolLink:
    """Keeps a `PoolClient` connected and moves blocks between it and the paged cache.

    `post` takes events that come unasked. `copier` is the thread that copies bytes, so that
    neither the loop nor the engine's thread waits for them.
    """

    def __init__(
        self,
        socket_path: Path,
        engine: Engine,
        copier: Executor,
        post: Callable[[ev.Event], None],
        *,
        identity: Identity,
        secret: bytes,
        progress_timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        self.load_seconds = 0.0
        self.transfers = TransferMeter()
        self._socket_path = socket_path
        self._engine = engine
        self._copier = copier
        self._post = post
        self._identity, self._secret = identity, secret
        self._progress_timeout_s = progress_timeout_s
        self._heartbeat_s = heartbeat_s
        self._client: PoolClient | None = None
        self._lost = asyncio.Event()

    @property
    def client(self) -> PoolClient:
        """The connected client. Raises `ConnectionLost` when there is none."""
        if self._client is None:
            raise ConnectionLost("the pool node is gone")
        return self._client

    # --- the connection ---

    async def connect(self, timeout_s: float) -> None:
        """Connect, waiting for a node that is about to start. Raises what the last try raised."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self._connect()
                return
            except _UNREACHABLE:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def stay_connected(self) -> None:
        """Connect again after each loss, until cancelled."""
        while True:
            await self._lost.wait()
            await asyncio.sleep(RECONNECT_PAUSE_S)
            try:
                await self._connect()
            except _UNREACHABLE as error:
                log.debug("%s: no pool node yet: %s", self._identity.name, error)

    async def _connect(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        lost = self._lost = asyncio.Event()

        def on_closed(reason: str) -> None:
            lost.set()
            self._post(ev.PoolLost())

        try:
            self._client = await PoolClient.connect(
                self._socket_path,
                identity=self._identity,
                secret=self._secret,
                on_commits=lambda attempt, blocks: self._post(ev.CommitsReceived(attempt, blocks)),
                on_loss=lambda attempt, handles: self._post(ev.LossReceived(attempt, handles)),
                on_closed=on_closed,
                timeout_s=ANSWER_TIMEOUT_S,
                heartbeat_s=self._heartbeat_s,
            )
        except BaseException:
            lost.set()
            raise
        self._post(ev.PoolConnected(self._client.ref))

    async def close(self) -> None:
        """End the connection; the node gives back everything of this worker."""
        if self._client is not None:
            await self._client.close()

    # --- actions without an outcome ---

    def close_transfer(self, attempt: AttemptId) -> None:
        """Give the attempt's slots back; when the node is gone, so are they."""
        if self._client is not None:
            self._client.close_transfer(attempt)

    def report_corrupt(self, handle: SlotHandle) -> None:
        """Tell the node that a block is wrong."""
        if self._client is not None:
            self._client.report_corrupt(handle)

    # --- actions with an outcome ---

    async def reserve(self, action: ev.ReserveSlots) -> ev.Event:
        """Carry out `ReserveSlots`."""
        try:
            outcomes = await self.client.reserve(
                action.attempt, action.block_hashes, action.num_private, ttl_s=LEASE_TTL_S
            )
        except _UNREACHABLE as error:
            return ev.ReserveFailed(action.attempt, str(error))
        return ev.SlotsReserved(action.attempt, action.indices, outcomes)

    async def fetch(self, action: ev.FetchPrefix) -> ev.Event:
        """Carry out `FetchPrefix`; what cannot be had is missing from the outcome."""
        blocks: tuple[LeasedBlock, ...] = ()
        try:
            if action.source is None:
                blocks = await self.client.lease(
                    action.attempt, action.block_hashes, ttl_s=LEASE_TTL_S
                )
            else:
                blocks = await self.client.fetch(
                    action.attempt,
                    action.source,
                    action.block_hashes,
                    ttl_s=LEASE_TTL_S,
                    deadline_s=self._progress_timeout_s,
                )
        except _UNREACHABLE as error:
            log.info("%s: fetched nothing for %s: %s", self._identity.name, action.attempt, error)
        return ev.PrefixFetched(action.attempt, action.first, len(action.block_hashes), blocks)

    async def load(self, action: ev.LoadBlocks) -> ev.Event:
        """Carry out `LoadBlocks`: copy and check one block after the other."""
        started_s = time.monotonic()
        sources: list[memoryview] = []
        problem: str | None = None
        for block in action.blocks:
            try:
                client = self.client
                sources.append(client.slot(block.leased.handle))
            except _UNREACHABLE as error:
                problem = str(error)
                break
        loop = asyncio.get_running_loop()
        num_good = await loop.run_in_executor(self._copier, self._copy_in, action.blocks, sources)
        took_s = time.monotonic() - started_s
        self.load_seconds += took_s
        if sources:
            num_bytes = num_good * self._engine.spec.block_bytes
            self.transfers.add(client.ref.name, self._identity.name, num_bytes, took_s)
        if num_good < len(sources):
            handle = action.blocks[num_good].leased.handle
            return ev.BlockCorrupt(action.attempt, num_good, handle)
        if problem is not None:
            return ev.LoadFailed(action.attempt, num_good, problem)
        return ev.BlocksLoaded(action.attempt)

    def _copy_in(self, blocks: tuple[ev.BlockToLoad, ...], sources: list[memoryview]) -> int:
        """Copy slots into the paged cache until a copy's checksum is wrong; return how many."""
        layers = range(self._engine.spec.num_layers)
        for number, (block, source) in enumerate(zip(blocks, sources, strict=False)):
            self._engine.write_block(block.block_id, source)
            checksums = [slice_checksum(self._read(block.block_id, layer)) for layer in layers]
            if block_checksum(checksums) != block.leased.checksum:
                return number
        return len(sources)

    def _read(self, block_id: int, layer: int) -> memoryview:
        return self._engine.read_slice(block_id, layer).cast("B")

    async def publish(self, action: ev.PublishBlocks) -> ev.Event:
        """Carry out `PublishBlocks` under a transfer named after this worker and the action."""
        transfer = AttemptId(RequestId(self._identity.incarnation, action.publish_id), 1)
        num_committed = 0
        try:
            async with asyncio.timeout(self._progress_timeout_s):
                num_committed = await self._publish(self.client, transfer, action.blocks)
        except _UNREACHABLE as error:
            log.info("%s: blocks were not published: %s", self._identity.name, error)
        finally:
            self.close_transfer(transfer)
        return ev.PublishEnded(action.publish_id, num_committed)

    async def _publish(
        self, client: PoolClient, transfer: AttemptId, blocks: tuple[ev.BlockToPublish, ...]
    ) -> int:
        hashes = [block.block_hash for block in blocks]
        outcomes = await client.reserve(transfer, hashes, 0, ttl_s=LEASE_TTL_S)
        to_write = {
            outcome.handle: block.block_id
            for block, outcome in zip(blocks, outcomes, strict=True)
            if isinstance(outcome, SlotReserved)
        }
        if not to_write:
            return 0
        with contextlib.closing(client.writer()) as writer:
            return await self._write(writer, client.ref.name, to_write)

    async def _write(self, writer: SlotWriter, pool: str, blocks: dict[SlotHandle, int]) -> int:
        loop = asyncio.get_running_loop()
        handles = list(blocks)
        accepted = await writer.begin(handles)
        handles = [handle for handle, ok in zip(handles, accepted, strict=True) if ok]
        for layer in range(self._engine.spec.num_layers):
            slices = await loop.run_in_executor(
                self._copier, lambda i: [self._read(blocks[h], i) for h in handles], layer
            )
            started_s = time.monotonic()
            await writer.write(layer, handles, slices)
            took_s = time.monotonic() - started_s
            num_bytes = len(slices) * self._engine.spec.layer_slice_bytes
            self.transfers.add(self._identity.name, pool, num_bytes, took_s)
        return sum(await writer.commit(handles))
