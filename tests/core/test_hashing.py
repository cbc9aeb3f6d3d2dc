"""Golden vectors of block hashes: the same in every process, on every host, for ever."""

from __future__ import annotations

import struct
from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.hashing import (
    HashRoot,
    extend_block_hashes,
    join_hashes,
    pack_token_ids,
    split_hashes,
    unpack_token_ids,
)

ROOT = HashRoot("mmmm", "tttt", "float32", "lkhtd", 16, "salt")
ROOT_DIGEST = "46c4485a9b86e39db875a18aae9bee0b208d964c605c285af1afe090d563214f"


def test_golden_root():
    assert ROOT.digest().hex() == ROOT_DIGEST


def test_the_root_is_what_its_definition_says():
    raw = b"".join(
        struct.pack("<I", len(part)) + part
        for part in (b"mmmm", b"tttt", b"float32", b"lkhtd", b"salt")
    )
    raw += struct.pack("<I", 16)
    assert ROOT.digest() == blake2b(raw, digest_size=32, person=b"halfmoon-root-1").digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "mmm"},
        {"tokenizer": "ttttx"},
        {"kv_dtype": "bfloat16"},
        {"layout": "lkthd"},
        {"block_size": 32},
        {"salt": ""},
        {"model": "mmmmt", "tokenizer": "ttt"},  # the same text when joined
    ],
)
def test_everything_in_the_root_matters(change):
    assert replace(ROOT, **change).digest() != ROOT.digest()


def test_golden_block_hashes():
    hashes = extend_block_hashes(ROOT.digest(), [1, 23, 4, 5, 6], 2)
    assert [h.hex() for h in hashes] == [
        "8220c8d4284bc270278f8ae0f3372e9bf17a20ab2b380c3e99ad5502123b9027",
        "e04119599fd29403ceab60a76f27b32eb3ea4ff164e55f0fce74e0637bf3fe52",
    ]


def test_tokens_do_not_run_together():
    (first,) = extend_block_hashes(ROOT.digest(), [1, 23], 2)
    (second,) = extend_block_hashes(ROOT.digest(), [12, 3], 2)
    assert first.hex() == "8220c8d4284bc270278f8ae0f3372e9bf17a20ab2b380c3e99ad5502123b9027"
    assert second.hex() == "1a5e4ba4c4d136769387057aef6bd2a8c9000aa6d2657ec2bec3c00fe96b5cb6"


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, st.integers(1, 9), st.integers(0, 40))
def test_extending_in_two_steps_gives_the_same_chain(tokens, block_size, blocks):
    whole = extend_block_hashes(ROOT.digest(), tokens, block_size)
    assert len(whole) == len(tokens) // block_size
    blocks = min(blocks, len(whole))
    first = extend_block_hashes(ROOT.digest(), tokens[: blocks * block_size], block_size)
    parent = first[-1] if first else ROOT.digest()
    rest = extend_block_hashes(parent, tokens[blocks * block_size :], block_size)
    assert first + rest == whole


@given(TOKENS.filter(bool), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens, data):
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[index] ^= 1 << data.draw(st.integers(0, 31))
    before = extend_block_hashes(ROOT.digest(), tokens, 1)
    after = extend_block_hashes(ROOT.digest(), changed, 1)
    assert before[:index] == after[:index]
    assert all(x != y for x, y in zip(before[index:], after[index:], strict=True))


@given(TOKENS)
def test_packing_round_trips(tokens):
    assert unpack_token_ids(pack_token_ids(tokens)) == tuple(tokens)
    hashes = extend_block_hashes(ROOT.digest(), tokens, 3)
    assert split_hashes(join_hashes(hashes)) == hashes


def test_half_a_token_and_half_a_hash_are_refused():
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_token_ids(b"12345")
    with pytest.raises(ValueError, match="33 bytes"):
        split_hashes(bytes(33))
    with pytest.raises(struct.error):
        pack_token_ids([-1])
