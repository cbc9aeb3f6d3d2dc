"""The proxy must do what it says, or tests built on it prove nothing."""

from __future__ import annotations

import asyncio

import pytest

from core.ids import Address
from tests.harness.fault_proxy import FaultProxy


@pytest.fixture
async def upstream():
    async def echo(reader, writer):
        while chunk := await reader.read(1000):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    yield Address(host, port)
    server.close()


async def send_and_read(proxy: FaultProxy, data: bytes, num_bytes: int) -> bytes:
    reader, writer = await asyncio.open_connection(proxy.address.host, proxy.address.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.readexactly(num_bytes), 5)
    finally:
        writer.transport.abort()


async def test_passes_bytes_unchanged_and_counts_them(upstream):
    async with FaultProxy(upstream) as proxy:
        data = bytes(range(256)) * 300
        assert await send_and_read(proxy, data, len(data)) == data
        assert proxy.to_server.num_bytes == proxy.to_client.num_bytes == len(data)


async def test_flips_exactly_one_bit(upstream):
    async with FaultProxy(upstream) as proxy:
        proxy.to_server.flip_at = 70_000
        got = await send_and_read(proxy, bytes(100_000), 100_000)
        assert [i for i, b in enumerate(got) if b] == [70_000]


async def test_cuts_after_the_given_byte(upstream):
    async with FaultProxy(upstream) as proxy:
        proxy.to_client.cut_at = 500
        with pytest.raises(asyncio.IncompleteReadError) as lost:
            await send_and_read(proxy, bytes(4000), 4000)
        assert len(lost.value.partial) == 500


async def test_hangs_until_resumed_and_duplicates(upstream):
    async with FaultProxy(upstream) as proxy:
        proxy.to_server.hang()
        reading = asyncio.create_task(send_and_read(proxy, b"abc", 6))
        while not proxy.to_server.num_bytes:
            await asyncio.sleep(0)
        assert not reading.done()
        proxy.to_server.duplicate_at = 0
        proxy.to_server.resume()
        assert await reading == b"abcabc"


async def test_an_absent_upstream_is_a_reset():
    async with FaultProxy(Address("127.0.0.1", 9)) as proxy:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await send_and_read(proxy, b"x", 1)
