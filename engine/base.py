"""The engine contract: what workers may ask of a model and its paged KV cache.

A worker owns one engine and calls it from one thread. The engine owns the memory of the paged
cache; which block belongs to whom is the caller's business (`core.paged`). Nothing here imports
torch, so that the simulator and the toy engine run without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.requests import PositionLogprobs, SamplingParams


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What everybody but the engine needs to know of a loaded model.

    `fingerprint` is a hex digest of configuration and weights. A block holds
    `[layer][K,V][kv_head][token][head_dim]`, contiguous; `layer_slice_bytes` is one layer of it.
    `max_model_len` counts prompt and output tokens together.
    """

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    kv_itemsize: int
    block_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    @property
    def layer_slice_bytes(self) -> int:
        """Bytes of one layer of one block (K and V)."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.kv_itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.layer_slice_bytes


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What sampling needs besides the logits: all of it request state, none of it batch state.

    `prompt_token_ids` is the client's own prompt; `output_token_ids` all tokens emitted so far, on
    whatever worker. The token to sample is output number `len(output_token_ids)` (from 0); with
    the seed, that number alone determines the random draw.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One request's part of a step: compute `token_ids` at positions `start...`.

    `block_ids` is the request's block table; position p lives in block `p // block_size`, and the
    table covers at least `start + len(token_ids)` positions. The KV of positions before `start`
    is already in those blocks. `sample` is set when the token after the last one is wanted.
    `prompt_logprobs` asks for the logprobs of each *next* prompt token at these positions:
    `next_token_ids[i]` is the token that stands at `start + i + 1`; only positions that have
    one are reported.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: SampleRequest | None = None
    prompt_logprobs: int | None = None
    next_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step gave for one request: the sampled token if asked, with logprobs if asked."""

    token_id: int | None = None
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


LayerDone = Callable[[int], None]
"""Called in the engine's thread when a layer's K and V of the whole step are in the cache.

For a device engine the callee may read that layer's slices at once through `read_slice`. It may
raise `StepAbandoned` to end the step there.
"""


class StepAbandoned(Exception):  # noqa: N818 (an event, not an error)
    """Nobody wants the running step any more: `Engine.step` lets it pass, without a result.

    Some of the step's K and V may be in the cache. The engine is ready for the next step, which
    may be the same one again.
    """


class Engine(Protocol):
    """A model over a paged KV cache of `num_blocks` blocks.

    Not thread-safe, except that `read_slice` of layers already announced by `LayerDone`, and
    `read_block`/`write_block`/`zero_block` of blocks that the running step does not name, may be
    called from other threads.
    """

    spec: ModelSpec
    num_blocks: int

    def step(
        self, sequences: Sequence[SequenceStep], layer_done: LayerDone | None = None
    ) -> list[SequenceResult]:
        """Run one forward pass over all `sequences`; results are in the same order.

        Sequences of any lengths may be mixed (prefill chunks and single decode tokens). Each
        result is what the sequence would give alone: no row depends on its neighbours.
        """
        ...

    def read_slice(self, block_id: int, layer: int) -> memoryview:
        """Bytes of one layer of a block, `layer_slice_bytes` long, read-only.

        Host engines return a view of the cache (valid until the block is reused); device engines
        a copy.
        """
        ...

    def read_block(self, block_id: int) -> memoryview:
        """Bytes of a whole block, `block_bytes` long; same rules as `read_slice`."""
        ...

    def write_block(self, block_id: int, data: memoryview) -> None:
        """Replace a block's bytes by `data`, `block_bytes` long."""
        ...

    def zero_block(self, block_id: int) -> None:
        """Fill a block with zeros, so that a partly filled block never carries old content."""
        ...

    def close(self) -> None:
        """Give the memory back. Calling it twice is allowed."""
        ...
