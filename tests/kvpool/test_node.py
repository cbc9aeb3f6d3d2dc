"""One pool node with local workers and remote writers, over real sockets and shared memory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from core.errors import AuthError, ConfigError, ConnectionLost, InvariantError, WireError
from core.ids import Incarnation, SlotHandle
from core.messages.to_pool import AlreadyCommitted, ReadBlocks, SlotReserved, SlotsExhausted
from kvpool.client import PoolClient
from kvpool.handover import descriptor_path
from tests.kvpool.harness import (
    CONFIG,
    LAYERS,
    SECRET,
    SLICE_BYTES,
    at_base,
    attempt,
    block_hash,
    check,
    content,
    hashes,
    identity,
    put,
    remote_writer,
    reserve_slots,
    running_node,
    until,
    worker,
    write,
)


async def test_blocks_written_in_place_are_leased_and_read_in_place(tmp_path):
    async with running_node(tmp_path) as node, worker(node.socket_path) as w:
        assert w.client.ref == node.ref
        await put(w, attempt(1), [1, 2, 3, 4])
        owner, commits = await w.commits.get()
        assert owner == attempt(1)
        for block, number in zip(commits, [1, 2, 3, 4], strict=True):
            check(w.client, block, number)
        w.client.close_transfer(attempt(1))

        leased = await w.client.lease(attempt(2), hashes(1, 2, 3, 9, 4), ttl_s=9)
        assert len(leased) == 3  # hits stop at the first gap
        for block, number in zip(leased, [1, 2, 3], strict=True):
            check(w.client, block, number)
        assert node.stats().num_leases == 3
        w.client.release(attempt(2), [leased[0].handle])
        await until(lambda: node.stats().num_leases == 2)
        w.client.close_transfer(attempt(2))
        await until(lambda: at_base(node, num_committed=4))
