"""Typed messages to and from msgpack, and the frame around them (`docs/wire.md`).

A message is a frozen dataclass. On the wire it is `[name, field, field, ...]`, positional, so both
sides must run the same `PROTOCOL_VERSION`, which the handshake checks. Decoding checks every
type; anything else than what the dataclass declares raises `WireError` naming the place.
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from hashlib import blake2s

import msgpack

from core.errors import AuthError, WireError

PROTOCOL_VERSION = 4

MAX_HEADER_BYTES = 8 << 20
"""Bound of one encoded message: a prompt of a million tokens fits twice."""

MAX_PAYLOAD_BYTES = 1 << 30
"""Bound of the raw bytes beside one message."""

MAC_BYTES = 16
PRELUDE_MAC_BYTES = 8
_FIXED = struct.Struct("<4sB3xIIQ")
_COUNTER = struct.Struct("<Q")
_MAGIC = b"HMF2"
PRELUDE_BYTES = _FIXED.size + PRELUDE_MAC_BYTES + MAC_BYTES

Message = object
"""An instance of one of the dataclasses of a `MessageSet`."""

_Codec = Callable[[typing.Any], typing.Any]


class FrameKind(IntEnum):
    """How a frame relates to others on its connection."""

    ONE_WAY = 0
    REQUEST = 1
    REPLY = 2
    ERROR = 3
    PING = 4


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Body of an ERROR frame."""

    code: str
    detail: str


class MessageSet:
    """The closed set of messages that one kind of receiver understands."""

    def __init__(self, *classes: type) -> None:
        self.classes = {cls.__name__: cls for cls in (*classes, ErrorReply)}

    def encode(self, message: Message) -> bytes:
        """Encode a message of this set. Raises `WireError` for any other object."""
        name = type(message).__name__
        if self.classes.get(name) is not type(message):
            raise WireError(f"{name} is not a message of this connection")
        header: bytes = msgpack.packb([name, *_encoder(self.classes[name])(message)])
        if len(header) > MAX_HEADER_BYTES:
            raise WireError(f"{name} takes {len(header)} bytes; the bound is {MAX_HEADER_BYTES}")
        return header

    def decode(self, header: bytes | bytearray | memoryview) -> Message:
        """Decode and check a message. Raises `WireError`."""
        try:
            raw = msgpack.unpackb(header, use_list=False, strict_map_key=True)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not msgpack: {error}") from error
        if not (isinstance(raw, tuple) and raw and isinstance(raw[0], str)):
            raise WireError("a message is an array that starts with its name")
        cls = self.classes.get(raw[0])
        if cls is None:
            raise WireError(f"unknown message {raw[0][:64]!r}")
        try:
            return _decoder(cls)(raw[1:])
        except WireError as error:
            raise WireError(f"{raw[0]}: {error}") from None


# --- frames -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prelude:
    """Fixed-size start of a frame; `correlation` pairs a request with its reply.

    `mac` is the frame's, `hashed` what the MAC has covered before the header.
    """

    kind: FrameKind
    header_bytes: int
    payload_bytes: int
    correlation: int
    mac: bytes
    hashed: blake2s


def seal(key: bytes, counter: int, kind: FrameKind, correlation: int, header: bytes,
         payload_bytes: int) -> bytes:  # fmt: skip
    """Return prelude + header of a frame. `counter` numbers the frames of this direction.

    Both MACs cover the counter, so frames cannot be replayed, dropped or reordered unnoticed. The
    payload is covered by the checksums inside the header.
    """
    fixed = _FIXED.pack(_MAGIC, kind, len(header), payload_bytes, correlation)
    hashed = _hash(key, counter, fixed)
    prelude_mac = hashed.digest()[:PRELUDE_MAC_BYTES]
    hashed.update(header)
    return b"".join((fixed, prelude_mac, hashed.digest(), header))


def parse_prelude(key: bytes, counter: int, raw: bytes | bytearray | memoryview) -> Prelude:
    """Read a prelude and check its own MAC and its bounds. Raises `AuthError` and `WireError`.

    What it returns may be believed before the header is there: with a wrong length, the header
    might never be complete.
    """
    fixed = bytes(raw[: _FIXED.size])
    magic, kind, header_bytes, payload_bytes, correlation = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise WireError("not a Halfmoon frame")
    hashed = _hash(key, counter, fixed)
    mac_start = _FIXED.size + PRELUDE_MAC_BYTES
    if hashed.digest()[:PRELUDE_MAC_BYTES] != raw[_FIXED.size : mac_start]:
        raise AuthError("wrong MAC of a prelude: the frame was changed, repeated or lost")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"oversized frame: header {header_bytes}, payload {payload_bytes} bytes")
    try:
        frame_kind = FrameKind(kind)
    except ValueError:
        raise WireError(f"unknown frame kind {kind}") from None
    mac = bytes(raw[mac_start:])
    return Prelude(frame_kind, header_bytes, payload_bytes, correlation, mac, hashed)


def verify(prelude: Prelude, header: bytes | bytearray | memoryview) -> None:
    """Check a frame's MAC, once its header is there. Raises `AuthError`."""
    hashed = prelude.hashed.copy()
    hashed.update(header)
    if hashed.digest() != prelude.mac:
        raise AuthError("wrong MAC: the frame was changed")


def _hash(key: bytes, counter: int, fixed: bytes) -> blake2s:
    return blake2s(_COUNTER.pack(counter) + fixed, key=key, digest_size=MAC_BYTES)


# --- codecs compiled from type hints ------------------------------------------------------------


@cache
def _encoder(tp: typing.Any) -> _Codec:
    tp = _strip_newtype(tp)
    if dataclasses.is_dataclass(tp):
        hints = typing.get_type_hints(tp)
        parts = [(f.name, _encoder(hints[f.name])) for f in dataclasses.fields(tp)]
        return lambda obj: [enc(getattr(obj, name)) for name, enc in parts]
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            item = _encoder(args[0])
            return (lambda obj: obj) if item is _same else (lambda obj: [item(x) for x in obj])
        items = [_encoder(a) for a in args]
        return lambda obj: [enc(x) for enc, x in zip(items, obj, strict=True)]
    if origin in (typing.Union, types.UnionType):
        return _union_encoder(args)
    if isinstance(tp, type) and issubclass(tp, StrEnum):
        return str
    if tp in _SCALARS:
        return _same
    raise TypeError(f"{tp} cannot go over the wire")


def _union_encoder(args: tuple[typing.Any, ...]) -> _Codec:
    members = [a for a in args if a is not types.NoneType]
    if len(members) == 1:
        inner = _encoder(members[0])
        return lambda obj: None if obj is None else inner(obj)
    encoders = {cls: _encoder(cls) for cls in members}
    return lambda obj: None if obj is None else [type(obj).__name__, *encoders[type(obj)](obj)]


@cache
def _decoder(tp: typing.Any) -> _Codec:
    tp = _strip_newtype(tp)
    if dataclasses.is_dataclass(tp):
        return _dataclass_decoder(typing.cast(type, tp))
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin is tuple:
        return _tuple_decoder(args)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(args)
    if isinstance(tp, type) and issubclass(tp, StrEnum):
        return _enum_decoder(tp)
    if tp in _SCALARS:
        return _scalar_decoder(tp)
    raise TypeError(f"{tp} cannot come over the wire")


def _dataclass_decoder(cls: type) -> _Codec:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    decoders = [_decoder(hints[name]) for name in names]

    def decode(raw: typing.Any) -> typing.Any:
        if not isinstance(raw, tuple) or len(raw) != len(decoders):
            raise WireError(f"{cls.__name__} has {len(decoders)} fields")
        values = []
        for name, decoder, value in zip(names, decoders, raw, strict=True):
            try:
                values.append(decoder(value))
            except WireError as error:
                raise WireError(f"{name}: {error}") from None
        return cls(*values)

    return decode


def _tuple_decoder(args: tuple[typing.Any, ...]) -> _Codec:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _decoder(args[0])

        def decode_many(raw: typing.Any) -> typing.Any:
            if not isinstance(raw, tuple):
                raise WireError(f"expected an array, got {type(raw).__name__}")
            return tuple(item(x) for x in raw)

        return decode_many
    items = [_decoder(a) for a in args]

    def decode(raw: typing.Any) -> typing.Any:
        if not isinstance(raw, tuple) or len(raw) != len(items):
            raise WireError(f"expected an array of {len(items)}")
        return tuple(dec(x) for dec, x in zip(items, raw, strict=True))

    return decode


def _union_decoder(args: tuple[typing.Any, ...]) -> _Codec:
    optional = types.NoneType in args
    members = [a for a in args if a is not types.NoneType]
    if len(members) == 1:
        inner = _decoder(members[0])
    else:
        by_name = {cls.__name__: _decoder(cls) for cls in members}

        def inner(raw: typing.Any) -> typing.Any:
            names_one = isinstance(raw, tuple) and raw and isinstance(raw[0], str)
            if not (names_one and raw[0] in by_name):
                raise WireError(f"expected one of {sorted(by_name)}")
            return by_name[raw[0]](raw[1:])

    def decode(raw: typing.Any) -> typing.Any:
        if raw is None and optional:
            return None
        return inner(raw)

    return decode


def _enum_decoder(cls: type[StrEnum]) -> _Codec:
    def decode(raw: typing.Any) -> StrEnum:
        try:
            return cls(raw)
        except ValueError:
            raise WireError(f"{raw!r} is no {cls.__name__}") from None

    return decode


def _scalar_decoder(tp: type) -> _Codec:
    # bool is an int in Python but not on the wire; an int is a good float.
    allowed = (float, int) if tp is float else (tp,)

    def decode(raw: typing.Any) -> typing.Any:
        if type(raw) not in allowed:
            raise WireError(f"expected {tp.__name__}, got {type(raw).__name__}")
        return raw

    return decode


def _strip_newtype(tp: typing.Any) -> typing.Any:
    while isinstance(tp, typing.NewType):
        tp = tp.__supertype__
    return tp


def _same(obj: typing.Any) -> typing.Any:
    return obj


_SCALARS = frozenset({int, float, bool, str, bytes})
