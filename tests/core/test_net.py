"""Real sockets on loopback: greeting, frames, payloads, loss."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from core.errors import AuthError, ConnectionLost, RemoteError, WireError
from core.ids import Address, Incarnation
from core.net import BaseHandler, Connection, Identity, UnixEndpoint, dial, listen
from core.wire import MessageSet
from tests.harness.fault_proxy import FaultProxy

SECRET = b"s" * 32


@dataclass(frozen=True, slots=True)
class Note:
    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    size: int


@dataclass(frozen=True, slots=True)
class Answer:
    size: int


SETS = MessageSet(Note, Ask, Answer)


class Recorder(BaseHandler):
    def __init__(self) -> None:
        self.notes: asyncio.Queue[tuple[str, bytes | None]] = asyncio.Queue()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.target: list[memoryview] | None = None

    def on_message(self, conn, message, payload):
        assert isinstance(message, Note)
        self.notes.put_nowait((message.text, payload))

    async def on_request(self, conn, message):
        assert isinstance(message, Ask)
        if message.size < 0:
            raise WireError("negative")
        return Answer(message.size), [bytes(range(256)) * message.size]

    def payload_target(self, conn, message, payload_bytes):
        return self.target

    def on_closed(self, conn, reason):
        self.closed.set_result(reason)


def who(name: str) -> Identity:
    return Identity("test", name, Incarnation(f"{name}-1"))


async def pair(tmp_path=None, heartbeat_s=1.0):
    server, client = Recorder(), Recorder()
    endpoint = Address("127.0.0.1", 0) if tmp_path is None else UnixEndpoint(tmp_path / "s")
    listener = await listen(
        endpoint,
        server,
        identity=who("server"),
        secret=SECRET,
        sets=lambda kind: (SETS, SETS),
        heartbeat_s=heartbeat_s,
    )
    conn = await dial(
        listener.endpoint,
        client,
        identity=who("client"),
        secret=SECRET,
        sends=SETS,
        receives=SETS,
        heartbeat_s=heartbeat_s,
    )
    while not listener.connections:  # the server still reads the client's proof
        await asyncio.sleep(0)
    return server, client, listener, conn


@pytest.mark.parametrize("unix", [False, True])
async def test_messages_requests_and_payloads(tmp_path, unix):
    server, client, listener, conn = await pair(tmp_path if unix else None)
    conn.post(Note("hello"))
    big = bytes(1000) * 3000
    await conn.send(Note("big"), [big, b"tail"])
    assert await server.notes.get() == ("hello", None)
    assert await server.notes.get() == ("big", big + b"tail")

    into = bytearray(256 * 5000)
    reply, payload = await conn.request(
        Ask(5000), timeout_s=5, into=[memoryview(into)[:1000], memoryview(into)[1000:]]
    )
    assert reply == Answer(5000)
    assert payload is None
    assert into == bytes(range(256)) * 5000
    assert await conn.request(Ask(1), timeout_s=5) == (Answer(1), bytes(range(256)))
    with pytest.raises(RemoteError, match="negative"):
        await conn.request(Ask(-1), timeout_s=5)

    # The server may speak first, on the same connection.
    for other in listener.connections:
        other.post(Note("from the server"))
    assert await client.notes.get() == ("from the server", None)
    conn.close("done")
    await conn.wait_closed()
    assert await client.closed == "done"
    assert await server.closed == "closed by the peer"
    await listener.close()


async def test_payload_goes_straight_into_the_target():
    server, _, listener, conn = await pair()
    memory = bytearray(600_000)
    server.target = [memoryview(memory)[100_000:400_000], memoryview(memory)[0:100_000]]
    await conn.send(Note("x"), [b"a" * 300_000, b"b" * 100_000])
    assert await server.notes.get() == ("x", None)
    assert memory == b"b" * 100_000 + b"a" * 300_000 + bytes(200_000)
    await conn.send(Note("wrong size"), [b"a"])
    assert "does not fit" in await server.closed
    await listener.close()


async def test_wrong_secret_and_wrong_incarnation_are_refused():
    _, client, listener, conn = await pair()
    for kwargs, error in (
        ({"secret": b"x" * 32}, AuthError),
        ({"secret": SECRET, "expect": Incarnation("server-0")}, ConnectionLost),
    ):
        with pytest.raises(error):
            await dial(
                listener.endpoint,
                client,
                identity=who("other"),
                sends=SETS,
                receives=SETS,
                **kwargs,
            )
    conn.post(Note("the first one still works"))
    conn.close()
    await listener.close()


async def test_pending_requests_fail_when_the_peer_dies():
    _, _, listener, conn = await pair()

    async def never(conn, message):
        await asyncio.Event().wait()

    for accepted in listener.connections:
        accepted._handler.on_request = never
    request = asyncio.create_task(conn.request(Ask(1), timeout_s=30))
    await asyncio.sleep(0)
    await listener.close()
    with pytest.raises(ConnectionLost):
        await request
    with pytest.raises(ConnectionLost):
        conn.post(Note("too late"))


async def test_silence_of_three_heartbeats_is_a_loss():
    server, client, listener, conn = await pair(heartbeat_s=0.05)
    conn._tasks[2].cancel()  # the client stops beating, as a stopped process does
    assert await server.closed == "silent for three heartbeats"
    assert await client.closed == "closed by the peer"
    await listener.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 100, b""], ids=["http", "ones", "nothing"]
)
async def test_garbage_is_refused_and_hurts_nobody(garbage):
    server, _, listener, conn = await pair()
    assert isinstance(listener.endpoint, Address)
    reader, writer = await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
    writer.write(garbage)
    with contextlib.suppress(ConnectionResetError):
        writer.write_eof()
        await reader.read()
    writer.close()
    conn.post(Note("fine"))
    assert await server.notes.get() == ("fine", None)
    conn.close()
    await listener.close()


@pytest.mark.parametrize("byte", [10, -1], ids=["64 KiB longer", "header"])
async def test_a_changed_frame_closes_the_connection_at_once(byte):
    """A wrong length too: the bytes it promises never come, whatever else the peer sends."""
    server, _, listener, conn = await pair()
    original = conn._sock

    class Flip:
        def sendmsg(self, views):
            raw = bytearray(b"".join(views))
            raw[byte] ^= 1
            return original.send(raw)

        def __getattr__(self, name):
            return getattr(original, name)

    conn._sock = Flip()
    conn.post(Note("changed"))
    async with asyncio.timeout(20):
        assert "wrong MAC" in await server.closed
    conn._sock = original
    conn.close()
    await conn.wait_closed()
    await listener.close()


@pytest.mark.parametrize(
    ("direction", "error"), [("to_server", "closed during"), ("to_client", "not a Halfmoon")]
)
async def test_a_greeting_of_changed_length_is_not_waited_for(direction, error):
    _, client, listener, conn = await pair()
    assert isinstance(listener.endpoint, Address)
    async with FaultProxy(listener.endpoint) as proxy:
        getattr(proxy, direction).flip_at = 1  # 256 bytes more
        with pytest.raises((ConnectionLost, WireError), match=error):
            await dial(
                proxy.address,
                client,
                identity=who("other"),
                secret=SECRET,
                sends=SETS,
                receives=SETS,
            )
    conn.close()
    await listener.close()


async def test_giving_up_in_the_middle_of_a_reply_closes():
    """The target memory belongs to the transfer, so it cannot be left to a late payload."""
    _, client, listener, conn = await pair()
    into = bytearray(256 * 200_000)
    request = asyncio.create_task(conn.request(Ask(200_000), timeout_s=30, into=[memoryview(into)]))
    while not any(p.reading for p in conn._pending.values()):
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert await client.closed == "gave up in the middle of a reply"
    assert isinstance(conn, Connection)
    await listener.close()
