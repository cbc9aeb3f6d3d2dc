"""A TCP proxy that misbehaves on command, for tests of what a network can do.

One proxy stands before one address. Faults are set per direction and apply to every connection
from then on; byte offsets count the bytes of that direction since the proxy started.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from core.ids import Address

_CHUNK_BYTES = 16 << 10


@dataclass(slots=True)
class Faults:
    """What happens to the bytes of one direction."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    flip_at: int | None = None
    cut_at: int | None = None
    duplicate_at: int | None = None
    drop: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.open.set()

    def hang(self) -> None:
        """Forward nothing until `resume`; connections stay open."""
        self.open.clear()

    def resume(self) -> None:
        """Forward again, starting with what was held back."""
        self.open.set()


class FaultProxy:
    """`async with FaultProxy(upstream) as proxy`; clients dial `proxy.address`."""

    def __init__(self, upstream: Address) -> None:
        self.upstream = upstream
        self.to_server = Faults()
        self.to_client = Faults()
        self.address = Address("", 0)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = Address(host, port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection now; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection(
                self.upstream.host, self.upstream.port
            )
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(up_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, self.to_server)),
            asyncio.create_task(self._pump(up_reader, writer, self.to_client)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in (writer, up_writer):
                each.transport.abort()
                self._writers.discard(each)
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK_BYTES):
                start = faults.num_bytes
                faults.num_bytes += len(chunk)
                await faults.open.wait()
                if faults.delay_s:
                    await asyncio.sleep(faults.delay_s)
                if faults.bytes_per_s is not None:
                    await asyncio.sleep(len(chunk) / faults.bytes_per_s)
                if faults.drop:
                    continue
                if faults.flip_at is not None and start <= faults.flip_at < start + len(chunk):
                    raw = bytearray(chunk)
                    raw[faults.flip_at - start] ^= 0x01
                    chunk = bytes(raw)
                if faults.cut_at is not None and start + len(chunk) > faults.cut_at:
                    writer.write(chunk[: max(0, faults.cut_at - start)])
                    await writer.drain()
                    return
                if faults.duplicate_at is not None and start >= faults.duplicate_at:
                    faults.duplicate_at = None
                    chunk += chunk
                writer.write(chunk)
                await writer.drain()
