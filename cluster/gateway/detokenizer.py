"""Incremental detokenising that is exact: the pieces joined equal one decode of all ids.

Which way is exact depends on the tokenizer's decoder, so there is one class for each family:

- byte-level BPE (GPT-2 and after): every token is bytes, and the text is their UTF-8;
- byte fallback (SentencePiece): tokens are text, but a run of byte tokens is UTF-8 of its own;
- anything else: decode a sliding window twice and show the difference.

All are O(1) amortised a token. A character whose bytes have not all come shows nothing yet.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """Turns token ids into text, one after the other; owned by one output."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """Return what is left, incomplete characters as U+FFFD. Nothing may be pushed after it."""
        ...


class ByteLevelDecoder:
    """For decoders of type `ByteLevel`; `token_bytes` gives a token's bytes, empty if hidden."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `IncrementalDecoder`."""
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """See `IncrementalDecoder`."""
        return self._utf8.decode(b"", final=True)


class ByteFallbackDecoder:
    """For `ByteFallback` inside a sequence of decoders.

    `piece` gives a token's text, or its byte as `bytes`, or "" if hidden. A run of byte tokens is
    one unit: if it is not valid UTF-8 as a whole, each of its bytes shows as U+FFFD. So a run is
    shown when it ends. `num_stripped` leading spaces of the whole text are dropped.
    """

    def __init__(self, piece: Callable[[int], str | bytes], num_stripped: int) -> None:
        self._piece = piece
        self._num_stripped = num_stripped
        self._run = b""

    def push(self, token_id: int) -> str:
        """See `IncrementalDecoder`."""
        piece = self._piece(token_id)
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        if not piece:  # a hidden token does not end a run: the decoder never sees it
            return ""
        return self._end_run() + self._strip(piece)

    def finish(self) -> str:
        """See `IncrementalDecoder`."""
        return self._end_run()

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return self._strip(run.decode())
        except UnicodeDecodeError:
            return self._strip(REPLACEMENT * len(run))

    def _strip(self, text: str) -> str:
        while self._num_stripped and text:
            if text[0] != " ":
                self._num_stripped = 0
                break
            text, self._num_stripped = text[1:], self._num_stripped - 1
        return text


class WindowDecoder:
    """For any other decoder whose text for a token depends on its close neighbours only."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # the first so many tokens of the window are shown already

    def push(self, token_id: int) -> str:
        """See `IncrementalDecoder`."""
        self._window.append(token_id)
        text = self._decode(self._window)
        before = self._decode(self._window[: self._shown])
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]

    def finish(self) -> str:
        """See `IncrementalDecoder`."""
        return self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: GPT-2's `bytes_to_unicode`. Printable Latin-1 stands for itself, the rest is moved
    above U+0100 in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(plain)]
    alphabet = {chr(b): b for b in plain}
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(moved)})
    return alphabet
