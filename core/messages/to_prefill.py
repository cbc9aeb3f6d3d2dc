"""Messages that a prefill worker receives: from the gateway and from decode workers."""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import AttemptId, PoolRef, SlotHandle, WorkerRef
from core.messages.to_conductor import BlockSource
from core.requests import SamplingParams
from core.wire import MessageSet


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One way from the gateway: compute these tokens and sample the next one.

    `token_ids` are all known tokens (packed u32): the client's prompt, then `num_output_tokens`
    already emitted ones. The token sampled here is output number `num_output_tokens`.
    `block_hashes` are joined hashes of the full blocks of `token_ids`; the first
    `num_reusable_blocks` of them may be taken from a cache (0 when prompt logprobs are wanted).
    `decode` is `None` when the attempt ends with its first token.
    """

    attempt: AttemptId
    token_ids: bytes
    num_output_tokens: int
    block_hashes: bytes
    num_reusable_blocks: int
    params: SamplingParams
    sources: tuple[BlockSource, ...]
    decode: WorkerRef | None
    priority: int


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """One way from the gateway: this attempt and older ones of the request are over."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class SlotForBlock:
    """Block number `index` of the request belongs into this slot."""

    index: int
    handle: SlotHandle


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """One way from the decode worker: write these blocks into these slots of its pool node.

    May come before the `PrefillRequest` itself, and more than once for one attempt: blocks that
    were expected from elsewhere and did not come. The prefill worker keeps the attempt's blocks
    until `ReleasePrefill`, a cancel, or the loss of the decode worker or gateway.
    """

    attempt: AttemptId
    pool: PoolRef
    slots: tuple[SlotForBlock, ...]


@dataclass(frozen=True, slots=True)
class ReleasePrefill:
    """One way from the decode worker: it has every block; the attempt's blocks may go."""

    attempt: AttemptId


MESSAGES = MessageSet(PrefillRequest, CancelPrefill, DecodeSlots, ReleasePrefill)
"""What a prefill worker may be sent."""
