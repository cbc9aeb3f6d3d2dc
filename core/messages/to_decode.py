"""Messages that a decode worker receives: from the gateway and from prefill workers."""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import AttemptId, WorkerRef
from core.messages.to_conductor import BlockSource
from core.requests import SamplingParams
from core.wire import MessageSet


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One way from the gateway: continue this attempt after its prefill.

    `token_ids`, `num_output_tokens`, `block_hashes` and `params` as in `PrefillRequest`.
    `root` is the hash that the request's first block has as parent (tenant salt included), so
    that blocks made by decoding can be published. `prefill` is `None` for a coupled worker,
    which then computes the tokens itself and samples output number `num_output_tokens`.
    """

    attempt: AttemptId
    token_ids: bytes
    num_output_tokens: int
    block_hashes: bytes
    root: bytes
    num_reusable_blocks: int
    params: SamplingParams
    sources: tuple[BlockSource, ...]
    prefill: WorkerRef | None
    priority: int


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """One way from the gateway: this attempt and older ones of the request are over."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """One way from the prefill worker: the first token is sampled.

    `finished` says that it also ended the generation: nothing is to decode, slots are given back.
    Blocks may still be on their way; their commits tell.
    """

    attempt: AttemptId
    token_id: int
    finished: bool


@dataclass(frozen=True, slots=True)
class PrefillGone:
    """One way from the prefill worker: it has no (more) such attempt; no block will come."""

    attempt: AttemptId


MESSAGES = MessageSet(DecodeRequest, CancelDecode, PrefillFinished, PrefillGone)
"""What a decode worker may be sent."""
