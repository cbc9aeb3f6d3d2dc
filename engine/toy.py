"""A model made of hashes: exact, fast, without torch, and unforgiving about its cache.

Each token's K and V are a hash of the token and of *everything* cached before it, on all layers,
and the next token is a hash of everything cached so far. The engine reads all of that from the
cache's bytes at every step, so a stale, missing, shifted, swapped, zeroed or half-written block
changes every token from there on. `toy_generate` gives the right answer without any cache.

The state of a sequence of n tokens is `sum(value * weight) mod 2^64` over every 64-bit word in its
cache, the weight of word j of position p being the odd number `2 * (p * words + j) + 1`: a sum can
be carried on token by token, and numpy recomputes it from the blocks in a few microseconds. An odd
weight makes every change of a single word visible, distinct weights every swap.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from itertools import chain
from operator import mul

import numpy as np
import numpy.typing as npt

from core.requests import PositionLogprobs, SamplingParams, TokenLogprob, finish_reason
from engine.base import LayerDone, ModelSpec, SampleRequest, SequenceResult, SequenceStep

Words = npt.NDArray[np.uint64]

_WORD_BYTES = 8
_MASK = 2**64 - 1


def toy_spec(
    *,
    block_size: int = 16,
    vocab_size: int = 1000,
    num_layers: int = 4,
    max_model_len: int = 4096,
    eos_token_ids: tuple[int, ...] = (0,),
    head_dim: int = 8,
    fingerprint: str = "746f79",
) -> ModelSpec:
    """Return a toy model's spec; by default a token takes 16 bytes of cache per layer.

    The tokens that a toy model makes depend on `num_layers`, `head_dim` and `vocab_size`, and not
    on `block_size`.
    """
    return ModelSpec(
        fingerprint=fingerprint,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=head_dim,
        kv_dtype="uint8",
        kv_itemsize=1,
        block_size=block_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )


def toy_generate(
    prompt_token_ids: Sequence[int], params: SamplingParams, spec: ModelSpec
) -> list[int]:
    """Return what a correct `ToyEngine` generates, straight from the tokens.

    This is the oracle: it keeps no cache, and follows the finish rules of `core.requests`, so the
    last token is the stop token if there is one. Raises `ValueError` for an empty prompt.
    """
    if not prompt_token_ids:
        raise ValueError("a prompt needs at least one token")
    words = _words_per_token(spec)
    state = 0
    for position, token_id in enumerate(prompt_token_ids):
        state = _advance(state, position, _token_content(state, token_id, words))
    output: list[int] = []
    while True:
        token_id = _next_token(state, SampleRequest(params, prompt_token_ids, output), spec)
        output.append(token_id)
        if finish_reason(params, len(output), token_id) is not None:
            return output
        position = len(prompt_token_ids) + len(output) - 1
        state = _advance(state, position, _token_content(state, token_id, words))


class ToyEngine:
    """`engine.base.Engine` over a numpy array `[block][layer][K,V][kv_head][token][word]`.

    Works for every spec whose head is a whole number of 8-byte words. Of the sampling parameters
    it honours temperature (0 is greedy; anything else a draw from all tokens), seed, min_tokens,
    stop_token_ids, forced_token_ids, logprobs and prompt_logprobs. Sequences are read before
    anything of the step is written, so one that relies on a neighbour's unwritten block fails.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int) -> None:
        words = _words_per_token(spec)
        words_per_head = spec.head_dim * spec.kv_itemsize // _WORD_BYTES
        layout = (spec.num_layers, 2, spec.num_kv_heads, spec.block_size, words_per_head)
        self.spec = spec
        self.num_blocks = num_blocks
        self._cache: Words = np.zeros((num_blocks, *layout), dtype=np.uint64)
        self._bytes = self._cache.data.cast("B")
        self._words = words
        self._weights = _block_weights(layout, words)
        self._closed = False

    def step(
        self, sequences: Sequence[SequenceStep], layer_done: LayerDone | None = None
    ) -> list[SequenceResult]:
        """See `Engine.step`. Raises `ValueError` for a step that breaks the contract."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        for sequence in sequences:
            self._check(sequence)
        passes = [self._forward(sequence) for sequence in sequences]
        self._write(sequences, passes, layer_done)
        return [self._result(*pair) for pair in zip(sequences, passes, strict=True)]

    def read_slice(self, block_id: int, layer: int) -> memoryview:
        """See `Engine.read_slice`."""
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"layer {layer} of {self.spec.num_layers}")
        size = self.spec.layer_slice_bytes
        return self.read_block(block_id)[layer * size : (layer + 1) * size]

    def read_block(self, block_id: int) -> memoryview:
        """See `Engine.read_block`."""
        return self._block(block_id).toreadonly()

    def write_block(self, block_id: int, data: memoryview) -> None:
        """See `Engine.write_block`. Raises `ValueError` when `data` has another length."""
        self._block(block_id)[:] = data

    def zero_block(self, block_id: int) -> None:
        """See `Engine.zero_block`."""
        self._block(block_id)[:] = bytes(self.spec.block_bytes)

    def close(self) -> None:
        """Refuse further steps. The memory goes with the last view of it."""
        self._closed = True

    def _block(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        size = self.spec.block_bytes
        return self._bytes[block_id * size : (block_id + 1) * size]

    def _check(self, sequence: SequenceStep) -> None:
        """Refuse what a real engine would answer with garbage or a crash."""
        end = sequence.start + len(sequence.token_ids)
        if not sequence.token_ids or sequence.start < 0:
            raise ValueError("a sequence step needs at least one token and a start of at least 0")
        if end > self.spec.max_model_len:
            raise ValueError(f"{end} positions exceed max_model_len {self.spec.max_model_len}")
        if len(sequence.block_ids) * self.spec.block_size < end:
            raise ValueError(f"{len(sequence.block_ids)} blocks do not cover {end} positions")
        if not 0 <= min(sequence.block_ids) <= max(sequence.block_ids) < self.num_blocks:
            raise ValueError(f"block table {list(sequence.block_ids)} of {self.num_blocks} blocks")
        if not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < self.spec.vocab_size:
            raise ValueError(f"token ids outside the vocabulary of {self.spec.vocab_size}")

    def _forward(self, sequence: SequenceStep) -> _Pass:
        """Compute the sequence's new words and the state after each of its tokens."""
        state = self._cached_state(sequence.block_ids, sequence.start)
        contents: list[bytes] = []
        states: list[int] = []
        for position, token_id in enumerate(sequence.token_ids, start=sequence.start):
            content = _token_content(state, token_id, self._words)
            state = _advance(state, position, content)
            contents.append(content)
            states.append(state)
        return _Pass(contents, states)

    def _cached_state(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """Recompute the state after `num_tokens` positions from the cache's bytes."""
        if num_tokens == 0:
            return 0
        block_size = self.spec.block_size
        num_blocks = -(-num_tokens // block_size)
        blocks = self._cache[list(block_ids[:num_blocks])]
        if num_tokens % block_size:
            blocks[-1, :, :, :, num_tokens % block_size :] = 0
        flat = blocks.reshape(num_blocks, -1)
        # Weights of block k are those of block 0 plus a constant times k.
        first = np.arange(num_blocks, dtype=np.uint64) * np.uint64(2 * block_size * self._words)
        total = int((flat @ self._weights).sum()) + int((flat.sum(axis=1) * first).sum())
        return total & _MASK

    def _write(
        self, sequences: Sequence[SequenceStep], passes: list[_Pass], layer_done: LayerDone | None
    ) -> None:
        """Write all new words into the blocks, layer by layer, announcing each."""
        spec = self.spec
        if passes:
            positions = [
                (sequence.block_ids[p // spec.block_size], p % spec.block_size)
                for sequence in sequences
                for p in range(sequence.start, sequence.start + len(sequence.token_ids))
            ]
            block_ids, offsets = np.array(positions, dtype=np.intp).T
            content = b"".join(chain.from_iterable(one.contents for one in passes))
            values = np.frombuffer(content, dtype="<u8")
            values = values.reshape(len(positions), spec.num_layers, 2, spec.num_kv_heads, -1)
        for layer in range(spec.num_layers):
            if passes:
                self._cache[block_ids, layer, :, :, offsets] = values[:, layer]
            if layer_done is not None:
                layer_done(layer)

    def _result(self, sequence: SequenceStep, done: _Pass) -> SequenceResult:
        spec = self.spec
        about_prompt: tuple[PositionLogprobs, ...] = ()
        if sequence.prompt_logprobs is not None:
            about_prompt = tuple(
                _logprobs(state, token_id, sequence.prompt_logprobs, spec)
                for state, token_id in zip(done.states, sequence.next_token_ids, strict=False)
            )
        if sequence.sample is None:
            return SequenceResult(prompt_logprobs=about_prompt)
        state = done.states[-1]
        token_id = _next_token(state, sequence.sample, spec)
        num_top = sequence.sample.params.logprobs
        about_token = None if num_top is None else _logprobs(state, token_id, num_top, spec)
        return SequenceResult(token_id, about_token, about_prompt)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One sequence's forward pass: for each of its tokens the content, and the state after it."""

    contents: list[bytes]
    states: list[int]


def _words_per_token(spec: ModelSpec) -> int:
    """Return the 64-bit words that a token takes in the cache, all layers."""
    head_bytes = spec.head_dim * spec.kv_itemsize
    if head_bytes % _WORD_BYTES:
        raise ValueError(f"a toy head takes a multiple of {_WORD_BYTES} bytes, not {head_bytes}")
    return spec.num_layers * 2 * spec.num_kv_heads * head_bytes // _WORD_BYTES


def _block_weights(layout: tuple[int, int, int, int, int], words: int) -> Words:
    """Return the weights of a sequence's first block, flat, in the order of its bytes."""
    layers, _, heads, block_size, words_per_head = layout
    word = np.arange(words, dtype=np.uint64).reshape(layers, 2, heads, 1, words_per_head)
    token = np.arange(block_size, dtype=np.uint64).reshape(1, 1, 1, block_size, 1)
    weights: Words = np.uint64(2) * (token * np.uint64(words) + word) + np.uint64(1)
    return weights.reshape(-1)


def _token_content(state: int, token_id: int, words: int) -> bytes:
    """Return a token's K and V, as `[layer][K,V][kv_head][word]`, from all that stands before."""
    return shake_128(struct.pack("<2Q", state, token_id)).digest(words * _WORD_BYTES)


def _advance(state: int, position: int, content: bytes) -> int:
    """Return the state with one more token."""
    values = struct.unpack(f"<{len(content) // _WORD_BYTES}Q", content)
    first = 2 * position * len(values) + 1
    weights = range(first, first + 2 * len(values), 2)
    added: int = sum(map(mul, values, weights))
    return (state + added) & _MASK


def _draw(state: int, salt: int, counter: int, attempt: int) -> int:
    raw = struct.pack("<4Q", state, salt, counter, attempt)
    return int.from_bytes(blake2b(raw, digest_size=8, person=b"toy-token").digest(), "little")


def _next_token(state: int, request: SampleRequest, spec: ModelSpec) -> int:
    """Choose output number `len(request.output_token_ids)` from the state before it."""
    params, position = request.params, len(request.output_token_ids)
    if position < len(params.forced_token_ids):
        return params.forced_token_ids[position]
    salt, counter = (params.seed & _MASK, position + 1) if params.temperature > 0 else (0, 0)
    banned = frozenset(params.stop_token_ids) if position < params.min_tokens else frozenset()
    if len(banned) >= spec.vocab_size:
        banned = frozenset()
    attempt = 0
    while (token_id := _draw(state, salt, counter, attempt) % spec.vocab_size) in banned:
        attempt += 1
    return token_id


def _logprobs(state: int, token_id: int, num_top: int, spec: ModelSpec) -> PositionLogprobs:
    """Logprobs under a made-up distribution: rank r has probability 2^-r.

    The ranks go round the vocabulary, starting at the greedy token.
    """
    greedy = _draw(state, 0, 0, 0) % spec.vocab_size

    def at_rank(rank: int) -> TokenLogprob:
        other = (greedy + rank - 1) % spec.vocab_size
        return TokenLogprob(other, -rank * math.log(2), rank)

    return PositionLogprobs(
        chosen=at_rank((token_id - greedy) % spec.vocab_size + 1),
        top=tuple(at_rank(rank) for rank in range(1, min(num_top, spec.vocab_size) + 1)),
    )
