"""The greeting of a connection: who is there, and does each side know the cluster secret?

    client: [version, kind, name, incarnation, nonce]
    server: [version, kind, name, incarnation, nonce, proof]
    client: [proof]

Each proof is keyed with the secret and covers both sides' names and nonces; so are the two session
keys, one a direction. A message follows its length and the inverted length, so that a damaged
one is not waited for (`docs/wire.md`).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgpack

from core.errors import AuthError, ConnectionLost, WireError
from core.ids import Incarnation
from core.wire import PROTOCOL_VERSION

_MAX_HELLO_BYTES = 1024
_LENGTH = struct.Struct("<HH")
_INVERTED = 0xFFFF


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is to its peers: `kind` is e.g. `prefill`, `name` unique in the cluster."""

    kind: str
    name: str
    incarnation: Incarnation


async def greet_as_client(
    sock: socket.socket, me: Identity, secret: bytes
) -> tuple[Identity, tuple[bytes, bytes]]:
    """Return the peer and the keys to send and to receive with.

    Raises `AuthError`, `WireError`, `ConnectionLost` or `OSError`.
    """
    nonce = secrets.token_bytes(32)
    await _send_hello(sock, [PROTOCOL_VERSION, me.kind, me.name, me.incarnation, nonce])
    server, theirs, proof = _parse_hello(await _read_hello(sock), with_proof=True)
    transcript = _transcript(me, server, nonce, theirs)
    if not hmac.compare_digest(proof, _prove(secret, b"server", transcript)):
        raise AuthError("the peer does not know the cluster secret")
    await _send_hello(sock, [_prove(secret, b"client", transcript)])
    return server, (_prove(secret, b"c2s", transcript), _prove(secret, b"s2c", transcript))


async def greet_as_server(
    sock: socket.socket, me: Identity, secret: bytes
) -> tuple[Identity, tuple[bytes, bytes]]:
    """See `greet_as_client`."""
    client, theirs, _ = _parse_hello(await _read_hello(sock), with_proof=False)
    nonce = secrets.token_bytes(32)
    transcript = _transcript(client, me, theirs, nonce)
    proof = _prove(secret, b"server", transcript)
    await _send_hello(sock, [PROTOCOL_VERSION, me.kind, me.name, me.incarnation, nonce, proof])
    answer = await _read_hello(sock)
    if not (
        len(answer) == 1
        and isinstance(answer[0], bytes)
        and hmac.compare_digest(answer[0], _prove(secret, b"client", transcript))
    ):
        raise AuthError("the peer does not know the cluster secret")
    return client, (_prove(secret, b"s2c", transcript), _prove(secret, b"c2s", transcript))


def _transcript(client: Identity, server: Identity, client_nonce: bytes, nonce: bytes) -> bytes:
    parts = [client.kind, client.name, client.incarnation, client_nonce]
    parts += [server.kind, server.name, server.incarnation, nonce]
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, *parts])
    return packed


def _prove(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return blake2b(transcript, key=secret[:64], person=purpose, digest_size=32).digest()


def _parse_hello(fields: Sequence[object], *, with_proof: bool) -> tuple[Identity, bytes, bytes]:
    if not fields or fields[0] != PROTOCOL_VERSION:
        raise WireError(f"the peer speaks protocol {fields[:1]}, this is {PROTOCOL_VERSION}")
    types = (int, str, str, str, bytes, bytes)[: 6 if with_proof else 5]
    if tuple(type(f) for f in fields) != types:
        raise WireError("malformed greeting")
    kind, name, incarnation, nonce = fields[1:5]
    proof = fields[5] if with_proof else b""
    assert isinstance(kind, str) and isinstance(name, str) and isinstance(incarnation, str)
    assert isinstance(nonce, bytes) and isinstance(proof, bytes)
    return Identity(kind, name, Incarnation(incarnation)), nonce, proof


async def _send_hello(sock: socket.socket, fields: Sequence[object]) -> None:
    body: bytes = msgpack.packb(list(fields))
    length = _LENGTH.pack(len(body), len(body) ^ _INVERTED)
    await asyncio.get_running_loop().sock_sendall(sock, length + body)


async def _read_hello(sock: socket.socket) -> Sequence[object]:
    size, inverted = _LENGTH.unpack(await _read_raw(sock, _LENGTH.size))
    if size ^ inverted != _INVERTED:
        raise WireError("not a Halfmoon greeting")
    if size > _MAX_HELLO_BYTES:
        raise WireError("oversized greeting")
    try:
        fields = msgpack.unpackb(await _read_raw(sock, size))
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"malformed greeting: {error}") from error
    if not isinstance(fields, list):
        raise WireError("malformed greeting")
    return fields


async def _read_raw(sock: socket.socket, num_bytes: int) -> bytes:
    raw = b""
    while len(raw) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(raw))
        if not part:
            raise ConnectionLost("closed during the greeting")
        raw += part
    return raw
