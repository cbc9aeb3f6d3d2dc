"""Golden bytes of messages and frames, and everything the codec refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import AuthError, WireError
from core.ids import (
    Address,
    AttemptId,
    Incarnation,
    PoolRef,
    RequestId,
    SlotHandle,
    WorkerRef,
)
from core.latency import LatencyProfile
from core.messages import to_conductor, to_decode, to_gateway, to_pool, to_prefill
from core.requests import FinishReason, PositionLogprobs, SamplingParams, TokenLogprob
from core.wire import (
    MAC_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PRELUDE_BYTES,
    ErrorReply,
    FrameKind,
    MessageSet,
    parse_prelude,
    seal,
    verify,
)

ATTEMPT = AttemptId(RequestId(Incarnation("00000000000000aa"), 7), 2)
POOL = PoolRef("pool-0", Incarnation("00000000000000cc"), Address("127.0.0.1", 7001))
WORKER = WorkerRef("prefill-0", Incarnation("00000000000000bb"), Address("127.0.0.1", 7002), POOL)
SLOT = SlotHandle(0, 3, POOL.incarnation, 9)
HASH = bytes(range(32))

CASES = [
    (
        to_conductor.MESSAGES,
        to_conductor.RegisterWorker(
            to_conductor.WorkerRole.PREFILL,
            WORKER,
            to_conductor.WorkerCapacity(100, 16, 8, 512),
            (ATTEMPT,),
            LatencyProfile("test", 1.0, 0.5, 0.0, 2.0, 0.25, 0.125),
        ),
        "96ae5265676973746572576f726b6572a770726566696c6c94a970726566696c6c2d30b030303030"
        "30303030303030303030626292a93132372e302e302e31cd1b5a93a6706f6f6c2d30b03030303030"
        "303030303030303030636392a93132372e302e302e31cd1b5994641008cd0200919292b030303030"
        "303030303030303030306161070297a474657374cb3ff0000000000000cb3fe0000000000000cb00"
        "00000000000000cb4000000000000000cb3fd0000000000000cb3fc0000000000000",
    ),
    (
        to_conductor.MESSAGES,
        to_conductor.WorkerReport(
            to_conductor.PrefillLoad(1, 2, 300, 40),
            to_conductor.DecodeLoad(1, 2, 300, 40, 0.5),
            False,
            (to_conductor.TransferTotals("pool-0", "decode-0", 4096, 0.25),),
        ),
        "95ac576f726b65725265706f7274940102cd012c28950102cd012c28cb3fe0000000000000c29194"
        "a6706f6f6c2d30a86465636f64652d30cd1000cb3fd0000000000000",
    ),
    (
        to_conductor.MESSAGES,
        to_conductor.PoolReport(
            1,
            2,
            3,
            4,
            5,
            (to_conductor.LinkSample(POOL.incarnation, 6, 0.5),),
            7,
            to_conductor.PoolTotals(8, 9, 10, 11),
            (to_conductor.TransferTotals("pool-1", "pool-0", 12, 0.25),),
        ),
        "9aaa506f6f6c5265706f727401020304059193b03030303030303030303030303030636306cb3fe0"
        "000000000000079408090a0b9194a6706f6f6c2d31a6706f6f6c2d300ccb3fd0000000000000",
    ),
    (
        to_conductor.REPLIES,
        to_conductor.Placement(
            3, WORKER, None, (to_conductor.BlockSource(POOL, 0, 4),), 0.5, 0.0, "why"
        ),
        "98a9506c6163656d656e740394a970726566696c6c2d30b030303030303030303030303030306262"
        "92a93132372e302e302e31cd1b5a93a6706f6f6c2d30b03030303030303030303030303030636392"
        "a93132372e302e302e31cd1b59c0919393a6706f6f6c2d30b0303030303030303030303030303063"
        "6392a93132372e302e302e31cd1b590004cb3fe0000000000000cb0000000000000000a3776879",
    ),
    (
        to_prefill.MESSAGES,
        to_prefill.PrefillRequest(
            attempt=ATTEMPT,
            token_ids=b"\x01\0\0\0\x02\0\0\0",
            num_output_tokens=1,
            block_hashes=HASH,
            num_reusable_blocks=1,
            params=SamplingParams(max_tokens=5, logit_bias=((3, -1.5),), bad_words=((1, 2), (3,))),
            sources=(),
            decode=None,
            priority=-1,
        ),
        "9aae50726566696c6c526571756573749292b0303030303030303030303030303061610702c40801"
        "0000000200000001c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d"
        "1e1f01dc00100500cb0000000000000000cb3ff000000000000000cb0000000000000000cb000000"
        "0000000000cb0000000000000000cb3ff0000000000000919203cbbff80000000000009292010291"
        "039000c0c09090c0ff",
    ),
    (
        to_decode.MESSAGES,
        to_decode.PrefillFinished(ATTEMPT, 42, False),
        "94af50726566696c6c46696e69736865649292b03030303030303030303030303030616107022ac2",
    ),
    (
        to_gateway.MESSAGES,
        to_gateway.TokenFrame(
            (
                to_gateway.TokenEmitted(
                    ATTEMPT,
                    0,
                    42,
                    PositionLogprobs(TokenLogprob(42, -0.5, 1)),
                    FinishReason.STOP,
                    to_gateway.PrefillStats(3, 16, 32, 0.25, 0.0, 0.5),
                    (),
                ),
            )
        ),
        "92aa546f6b656e4672616d6591979292b0303030303030303030303030303061610702002a92932a"
        "cbbfe00000000000000190a473746f7096031020cb3fd0000000000000cb0000000000000000cb3f"
        "e000000000000090",
    ),
    (
        to_pool.REPLIES,
        to_pool.BlocksReserved(
            (
                to_pool.SlotReserved(SLOT),
                to_pool.AlreadyCommitted(to_pool.LeasedBlock(SLOT, 2**64 - 1)),
                to_pool.SlotsExhausted(),
            )
        ),
        "92ae426c6f636b7352657365727665649392ac536c6f745265736572766564940003b03030303030"
        "30303030303030303063630992b0416c7265616479436f6d6d697474656492940003b03030303030"
        "303030303030303030636309cfffffffffffffffff91ae536c6f7473457868617573746564",
    ),
    (
        to_pool.REPLIES,
        to_pool.BlocksLeased.pack(
            POOL.incarnation, 70, [3, 2**32 - 1], [9, 2**64 - 1], [2**64 - 1, 5]
        ),
        "96ac426c6f636b734c6561736564b03030303030303030303030303030636346c40803000000ffff"
        "ffffc4100900000000000000ffffffffffffffffc410ffffffffffffffff0500000000000000",
    ),
    (
        to_pool.MESSAGES,
        ErrorReply("code", "détail"),
        "93aa4572726f725265706c79a4636f6465a764c3a97461696c",
    ),
]


@pytest.mark.parametrize(
    ("messages", "message", "golden"), CASES, ids=[type(case[1]).__name__ for case in CASES]
)
def test_golden_bytes_of_messages(messages, message, golden):
    """A change here is a change of protocol: raise `PROTOCOL_VERSION`."""
    assert messages.encode(message).hex() == golden
    assert messages.decode(bytes.fromhex(golden)) == message


def test_leased_blocks_are_unpacked_in_order():
    leased = to_pool.BlocksLeased.pack(POOL.incarnation, 70, [3, 491], [9, 8], [2**64 - 1, 5])
    assert leased.num_blocks == 2
    assert leased.blocks() == (
        to_pool.LeasedBlock(SLOT, 2**64 - 1),
        to_pool.LeasedBlock(SlotHandle(7, 1, POOL.incarnation, 8), 5),
    )
    assert to_pool.BlocksLeased.pack(POOL.incarnation, 70, (), (), ()).blocks() == ()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("slots", bytes(16), "for each block"),
        ("slots", bytes(7), "for each block"),
        ("slots", b"", "for each block"),
        ("generations", bytes(8), "for each block"),
        ("generations", bytes(17), "for each block"),
        ("checksums", bytes(24), "for each block"),
        ("checksums", bytes(15), "for each block"),
        ("slots_per_segment", 0, "holds no block"),
        ("slots_per_segment", -1, "holds no block"),
    ],
)
def test_leased_blocks_that_contradict_themselves_are_refused(field, value, reason):
    leased = to_pool.BlocksLeased(POOL.incarnation, 70, bytes(8), bytes(16), bytes(16))
    assert len(leased.blocks()) == 2
    with pytest.raises(WireError, match=reason):
        replace(leased, **{field: value}).blocks()


KEY = b"k" * 32
HEADER = b"\x91\xa1x"
FRAME = (
    "484d4632"  # HMF2
    "01000000"  # kind, zeros
    "03000000"  # header bytes
    "2c010000"  # payload bytes
    "4d00000000000000"  # correlation
    "aacdfc9afdbb26f0"  # MAC over counter and all of the above
    "373d5defb6d5fe57ea51e48ae74c91d7"  # MAC over the same and the header
    "91a178"
)


def test_golden_bytes_of_a_frame():
    frame = seal(KEY, 5, FrameKind.REQUEST, 77, HEADER, 300)
    assert frame.hex() == FRAME
    prelude = parse_prelude(KEY, 5, frame[:PRELUDE_BYTES])
    assert (prelude.kind, prelude.header_bytes, prelude.payload_bytes, prelude.correlation) == (
        FrameKind.REQUEST,
        3,
        300,
        77,
    )
    verify(prelude, frame[PRELUDE_BYTES:])


@pytest.mark.parametrize("bit", range(8 * (PRELUDE_BYTES - MAC_BYTES)))
def test_a_changed_bit_before_the_header_is_refused_before_a_length_is_believed(bit):
    frame = bytearray.fromhex(FRAME)
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError, match=r"wrong MAC of a prelude|not a Halfmoon frame"):
        parse_prelude(KEY, 5, frame[:PRELUDE_BYTES])


@pytest.mark.parametrize("byte", range(PRELUDE_BYTES - MAC_BYTES, PRELUDE_BYTES + len(HEADER)))
def test_a_changed_mac_or_header_is_refused(byte):
    frame = bytearray.fromhex(FRAME)
    frame[byte] ^= 1
    prelude = parse_prelude(KEY, 5, frame[:PRELUDE_BYTES])
    with pytest.raises(AuthError):
        verify(prelude, frame[PRELUDE_BYTES:])


@pytest.mark.parametrize(("key", "counter"), [(KEY, 6), (KEY, 4), (b"x" * 32, 5)])
def test_a_repeated_lost_or_forged_frame_is_refused(key, counter):
    with pytest.raises(AuthError):
        parse_prelude(key, counter, bytes.fromhex(FRAME)[:PRELUDE_BYTES])


@pytest.mark.parametrize(
    ("kind", "header", "payload_bytes", "reason"),
    [
        (5, HEADER, 0, "unknown frame kind"),
        (0, bytes(MAX_HEADER_BYTES + 1), 0, "oversized"),
        (0, HEADER, MAX_PAYLOAD_BYTES + 1, "oversized"),
    ],
)
def test_a_prelude_out_of_bounds_is_refused_before_anything_is_read(
    kind, header, payload_bytes, reason
):
    frame = seal(KEY, 5, kind, 77, header, payload_bytes)
    with pytest.raises(WireError, match=reason):
        parse_prelude(KEY, 5, frame[:PRELUDE_BYTES])


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Left:
    number: int


@dataclass(frozen=True, slots=True)
class Right:
    text: str


@dataclass(frozen=True, slots=True)
class Everything:
    number: int
    ratio: float
    flag: bool
    text: str
    raw: bytes
    colour: Colour
    many: tuple[int, ...]
    pair: tuple[int, str]
    maybe: int | None
    either: Left | Right | None


@dataclass(frozen=True, slots=True)
class Stranger:
    number: int


SET = MessageSet(Everything)
GOOD = ["Everything", 1, 0.5, True, "t", b"r", "red", [1, 2], [1, "x"], None, ["Left", 3]]


def test_every_kind_of_field():
    message = Everything(1, 0.5, True, "t", b"r", Colour.RED, (1, 2), (1, "x"), None, Left(3))
    assert SET.decode(msgpack.packb(GOOD)) == message
    assert msgpack.unpackb(SET.encode(message)) == GOOD
    whole_ratio = [*GOOD[:2], 2, *GOOD[3:]]
    assert SET.decode(msgpack.packb(whole_ratio)) == Everything(
        1, 2, True, "t", b"r", Colour.RED, (1, 2), (1, "x"), None, Left(3)
    )


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (1, "1", "number: expected int, got str"),
        (1, True, "number: expected int, got bool"),
        (1, 1.0, "number: expected int, got float"),
        (2, "x", "ratio: expected float"),
        (2, False, "ratio: expected float"),
        (3, 1, "flag: expected bool, got int"),
        (4, b"t", "text: expected str, got bytes"),
        (5, "r", "raw: expected bytes, got str"),
        (6, "blue", "colour: 'blue' is no Colour"),
        (6, [], "colour:"),
        (7, 1, "many: expected an array"),
        (7, [1, "2"], "many: expected int"),
        (8, [1], "pair: expected an array of 2"),
        (8, [1, "x", 2], "pair: expected an array of 2"),
        (9, "x", "maybe: expected int"),
        (10, ["Stranger", 3], "either: expected one of"),
        (10, [], "either: expected one of"),
        (10, [{}, 3], "either: expected one of"),
        (10, ["Left", 3, 4], "either: Left has 1 fields"),
        (10, ["Left", None], "either: number: expected int"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value, reason):
    raw = list(GOOD)
    raw[field] = value
    with pytest.raises(WireError, match=reason):
        SET.decode(msgpack.packb(raw))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb(GOOD)[:-1], "not msgpack"),
        (msgpack.packb(GOOD) + b"x", "not msgpack"),
        (msgpack.packb({"a": 1}), "starts with its name"),
        (msgpack.packb([]), "starts with its name"),
        (msgpack.packb([1]), "starts with its name"),
        (msgpack.packb(["Stranger", 1]), "unknown message 'Stranger'"),
        (msgpack.packb(GOOD[:-1]), "10 fields"),
        (msgpack.packb([*GOOD, 1]), "10 fields"),
    ],
)
def test_a_wrong_message_is_refused(raw, reason):
    with pytest.raises(WireError, match=reason):
        SET.decode(raw)


def test_what_is_not_of_the_set_cannot_be_sent():
    with pytest.raises(WireError, match="not a message of this connection"):
        SET.encode(Stranger(1))
    with pytest.raises(WireError, match="the bound is"):
        SET.encode(ErrorReply("big", "x" * MAX_HEADER_BYTES))


@given(st.binary(max_size=60))
def test_garbage_is_a_wire_error_and_nothing_else(raw):
    for messages in (SET, to_conductor.MESSAGES, to_pool.MESSAGES):
        with pytest.raises(WireError):
            messages.decode(raw)


_JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@given(st.data())
def test_any_value_in_any_field_decodes_or_is_a_wire_error(data):
    raw = list(GOOD)
    raw[data.draw(st.integers(1, len(GOOD) - 1))] = data.draw(_JSONISH)
    packed = msgpack.packb(raw)
    try:
        message = SET.decode(packed)
    except WireError:
        return
    assert SET.decode(SET.encode(message)) == message or message != message
