"""Detokenising and stop strings: exact, never taken back, independent of where tokens are cut."""

from __future__ import annotations

import string
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from cluster.gateway.detokenizer import IncrementalDecoder
from cluster.gateway.stop_strings import ChoiceText, StopMatcher
from cluster.gateway.tokenizer import FastTokenizer
from tests.gateway.tiny_tokenizer import EOS, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
PADDED = tiny_tokenizer(padding=8)


def sentencepiece(strip: bool) -> FastTokenizer:
    """Like Llama 2 (with the strip) or Gemma (without): text pieces and byte tokens."""
    pieces = ["▁", "▁he", "llo", "é", "世", "a", "b", "▁▁", "<unk>"]
    tokens = [*pieces, *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return FastTokenizer(backend, vocab_size=len(vocab) + 2, chat_template=None)


def words() -> FastTokenizer:
    """Any other decoder: WordPiece joins words with spaces."""
    vocab = {w: i for i, w in enumerate(["[UNK]", "play", "##ing", "##s", "the", "ball", ","])}
    backend = BackendTokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return FastTokenizer(backend, vocab_size=len(vocab), chat_template=None)


TOKENIZERS = {
    "byte-level": BYTE_LEVEL,
    "byte-level, padded": PADDED,
    "sentencepiece, strip": sentencepiece(True),
    "sentencepiece": sentencepiece(False),
    "words": words(),
}


def pieces_of(decoder: IncrementalDecoder, token_ids: list[int]) -> list[str]:
    return [*(decoder.push(i) for i in token_ids), decoder.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_equal_one_decode(name, data, skip):
    """B02: for any ids, valid text or not, special tokens anywhere, shown or hidden."""
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    pieces = pieces_of(tokenizer.decoder(skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == whole


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece, strip", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_valid_text_shows_no_replacement_character(name, text):
    """B01: a character split over tokens shows when it is whole, and not before."""
    tokenizer = TOKENIZERS[name]
    text = text.replace("\ufffd", "")
    if name == "byte-level":
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    else:  # byte tokens only
        token_ids = [9 + b for b in text.encode()]
    shown = ""
    for piece in pieces_of(tokenizer.decoder(skip_special_tokens=False), token_ids):
        shown += piece
        assert "\ufffd" not in piece
    assert shown == tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 世界 é 🇯🇵", "A 世世ab", " a\u0301", " leading"])
def test_byte_level_shows_each_character_at_once(text):
    """B01, B02: nothing is held longer than its own bytes."""
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert len(token_ids) >= len(text.encode()) - 5  # one byte each, but for the few merges
    decoder = BYTE_LEVEL.decoder(skip_special_tokens=True)
    shown = ""
    for i, token_id in enumerate(token_ids):
        shown += decoder.push(token_id)
        raw = b"".join(BYTE_LEVEL.token_bytes(t) for t in token_ids[: i + 1])
        assert shown == raw.decode(errors="ignore")


def test_a_cut_character_at_the_end_reads_as_one_decode_does():
    token_ids = BYTE_LEVEL.encode("世", add_special_tokens=False)[:2]
    pieces = pieces_of(BYTE_LEVEL.decoder(skip_special_tokens=True), token_ids)
    assert pieces == ["", "", "\ufffd"]
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=True) == "\ufffd"


def test_special_tokens_hide_or_show():
    """B02: special tokens in the middle."""
    token_ids = BYTE_LEVEL.encode(f"a{EOS}b", add_special_tokens=False)
    hidden = "".join(pieces_of(BYTE_LEVEL.decoder(skip_special_tokens=True), token_ids))
    shown = "".join(pieces_of(BYTE_LEVEL.decoder(skip_special_tokens=False), token_ids))
    assert (hidden, shown) == ("ab", f"a{EOS}b")


# --- stop strings -------------------------------------------------------------------------------


def naive_cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The definition: the stop string that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


def run(text: ChoiceText, token_ids: list[int]) -> tuple[list[str], bool, int]:
    shown = []
    for n, token_id in enumerate(token_ids, 1):
        delta = text.push(token_id, ends_generation=False)
        shown.append(delta.text)
        if delta.stopped:
            return shown, True, n
    delta = text.finish()
    return [*shown, delta.text], delta.stopped, len(token_ids)


def choice(stops: list[str], **options) -> ChoiceText:
    return ChoiceText(BYTE_LEVEL.decoder(skip_special_tokens=True), stops, **options)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_cut_where_the_definition_says(text, stops, include):
    """B04: whatever overlaps, nothing of a stop string leaks, near misses come in full."""
    shown, stopped, _ = run(
        choice(stops, include_stop=include), BYTE_LEVEL.encode(text, add_special_tokens=False)
    )
    assert ("".join(shown), stopped) == naive_cut(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab世é", max_size=20),
    stops=st.lists(st.text("ab世é", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_every_shown_text_is_final(text, stops):
    """B04: what was shown is never part of a stop string that completes later."""
    final, _ = naive_cut(text, stops, False)
    shown = ""
    pieces, _, _ = run(choice(stops), BYTE_LEVEL.encode(text, add_special_tokens=False))
    for piece in pieces:
        shown += piece
        assert final.startswith(shown)


def test_generation_stops_with_the_token_that_completes_the_stop_string():
    """B04, B05: tokens after it are not taken."""
    token_ids = BYTE_LEVEL.encode("hi\n\nUser: x", add_special_tokens=False)
    shown, stopped, taken = run(choice(["\n\nUser:"]), token_ids)
    assert ("".join(shown), stopped, taken) == ("hi", True, len("hi\n\nUser:"))


@pytest.mark.parametrize("length", [201, 256])
def test_long_stop_strings(length):
    stop = (string.ascii_lowercase * 10)[:length]
    token_ids = BYTE_LEVEL.encode("x" + stop, add_special_tokens=False)
    assert "".join(run(choice([stop]), token_ids)[0]) == "x"
    missed = BYTE_LEVEL.encode("x" + stop[:-1] + "!", add_special_tokens=False)
    assert "".join(run(choice([stop]), missed)[0]) == "x" + stop[:-1] + "!"


def test_min_tokens_ignores_earlier_stop_strings():
    """B17: a stop completed before `min_tokens` is text like any other."""
    token_ids = BYTE_LEVEL.encode("a.bc.d", add_special_tokens=False)
    shown, stopped, taken = run(choice(["."], min_tokens=5), token_ids)
    assert ("".join(shown), stopped, taken) == ("a.bc", True, 5)


def test_an_ignored_stop_string_may_be_the_beginning_of_one_that_counts():
    """B17: they overlap."""
    token_ids = BYTE_LEVEL.encode("ababa!", add_special_tokens=False)
    shown, stopped, taken = run(choice(["aba"], min_tokens=5), token_ids)
    assert ("".join(shown), stopped, taken) == ("ab", True, 5)


def test_a_stop_token_shows_no_text_unless_stops_are_included():
    stop = BYTE_LEVEL.encode("x", add_special_tokens=False)[0]
    assert choice([]).push(stop, ends_generation=True).text == ""
    assert choice([], include_stop=True).push(stop, ends_generation=True).text == "x"


def test_the_matcher_holds_no_more_than_it_must():
    matcher = StopMatcher(["abab", "bc"])
    assert matcher.feed("xaba") == []
    assert matcher.num_held == 3
    assert matcher.feed("x") == []
    assert matcher.num_held == 0


def test_others_run_while_a_long_text_is_tokenised():
    order = []

    def encode() -> None:
        BYTE_LEVEL.encode("hello world " * 20_000, add_special_tokens=False)
        order.append("encoded")

    thread = threading.Thread(target=encode)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that nobody runs but when the tokenizer lets go
    try:
        thread.start()
        order.append("others")
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert order == ["others", "encoded"]
