"""The record of one attempt at a prefill worker, and the small questions about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from core.batching import Piece
from core.ids import AttemptId, BlockHash, Incarnation
from core.messages.to_conductor import BlockSource
from core.messages.to_gateway import PrefillStats, TokenEmitted
from core.messages.to_pool import LeasedBlock
from core.requests import FinishReason, PositionLogprobs, finish_reason
from engine.base import SampleRequest, SequenceResult, SequenceStep
from prefill.events import PrefillWork
from prefill.push import Push


class Phase(StrEnum):
    """Where an attempt is in its life; see `prefill.state`."""

    QUEUED = "queued"
    LOADING = "loading"
    COMPUTING = "computing"
    HANDING_OFF = "handing off"
    ENDING = "ending"


@dataclass(slots=True)
class Totals:
    """Sums since the start, for metrics."""

    computed_tokens: int = 0
    cached_local_tokens: int = 0
    cached_pool_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_first_tokens: int = 0
    num_failed: int = 0
    num_broken_blocks: int = 0

    def count(self, stats: PrefillStats) -> None:
        """Add an attempt that has its first token."""
        self.num_first_tokens += 1
        self.computed_tokens += stats.computed_tokens
        self.cached_local_tokens += stats.cached_local_tokens
        self.cached_pool_tokens += stats.cached_pool_tokens
        self.queue_s += stats.queue_s
        self.prefill_s += stats.load_s + stats.compute_s


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt, from its request until nothing touches its blocks any more.

    `num_computed` counts tokens, from the first on, whose K and V are complete in `block_ids`;
    `num_published` the full blocks that the paged cache can find. `running_end` is where its piece
    of the running chunk ends. `num_asked` counts leases, fetches and reservations that are not
    answered; they touch no block. `loading` says that a load is not. `own_indices` are the blocks
    that slots were reserved for at our own node, `own_pool` is that node. `needs_decode` holds as
    long as a decode worker may want blocks.
    """

    work: PrefillWork
    block_size: int
    received_s: float
    arrival: int
    phase: Phase = Phase.QUEUED
    block_ids: list[int] = field(default_factory=list)
    num_local_blocks: int = 0
    num_pool_blocks: int = 0
    num_computed: int = 0
    num_published: int = 0
    leased: list[LeasedBlock] = field(default_factory=list)
    asked_sources: list[BlockSource] = field(default_factory=list)
    num_asked: int = 0
    loading: bool = False
    used_pool: bool = False
    running_end: int | None = None
    own_indices: tuple[int, ...] = ()
    own_pool: Incarnation | None = None
    pushes: dict[Incarnation, Push] = field(default_factory=dict)
    admitted_s: float | None = None
    loaded_s: float | None = None
    started_s: float | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    token_id: int | None = None
    needs_decode: bool = False
    deadline_s: float | None = None

    @property
    def attempt(self) -> AttemptId:
        """Its name."""
        return self.work.attempt

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first: lower priority value, then earlier arrival."""
        return (self.work.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        """All known tokens."""
        return len(self.work.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that the known tokens take, the unfilled one included."""
        return -(-self.num_tokens // self.block_size)

    @property
    def reusable(self) -> tuple[BlockHash, ...]:
        """Hashes that may come from a cache: at least the last token is always computed."""
        most = (self.num_tokens - 1) // self.block_size
        return self.work.block_hashes[: min(self.work.num_reusable_blocks, most)]

    @property
    def unpublished(self) -> tuple[BlockHash, ...]:
        """Hashes of full blocks that this attempt is about to make."""
        return self.work.block_hashes[self.num_published :]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that came from a cache."""
        return (self.num_local_blocks + self.num_pool_blocks) * self.block_size

    @property
    def touched(self) -> bool:
        """Whether something may still read or write its blocks."""
        busy = any(push.busy for push in self.pushes.values())
        return busy or self.loading or self.running_end is not None

    def next_source(self, own: Incarnation) -> BlockSource | None:
        """Return a source, not asked before, that has the first missing block of the prefix."""
        index = self.num_local_blocks + len(self.leased)
        if index >= len(self.reusable):
            return None
        for source in self.work.sources:
            has_it = source.first <= index < source.first + source.count
            if has_it and source.pool.incarnation != own and source not in self.asked_sources:
                return source
        return None

    def num_ready_layers(self, index: int, num_layers: int, running_layers: int) -> int:
        """Layers of block `index` that are complete in the paged cache.

        `running_layers` are those that the running chunk has computed.
        """
        end = min((index + 1) * self.block_size, self.num_tokens)
        if self.num_computed >= end:
            return num_layers
        return running_layers if self.running_end is not None and self.running_end >= end else 0

    def step(self, piece: Piece) -> SequenceStep:
        """Return the engine's part of a chunk for `piece`."""
        work, tokens = self.work, self.work.token_ids
        num_prompt = len(tokens) - work.num_output_tokens
        # An attempt that continues after output tokens has sent its prompt's logprobs before.
        wanted = work.params.prompt_logprobs if work.num_output_tokens == 0 else None
        return SequenceStep(
            token_ids=tokens[piece.start : piece.end],
            start=piece.start,
            block_ids=tuple(self.block_ids),
            sample=SampleRequest(work.params, tokens[:num_prompt], tokens[num_prompt:])
            if piece.last
            else None,
            prompt_logprobs=wanted,
            next_token_ids=() if wanted is None else tokens[piece.start + 1 : piece.end + 1],
        )

    def stats(self, now_s: float) -> PrefillStats:
        """Account for all known tokens and all time since the request came."""
        admitted_s = _known(self.admitted_s)
        loaded_s = _known(self.loaded_s)
        started_s = _known(self.started_s)
        return PrefillStats(
            computed_tokens=self.num_tokens - self.num_cached_tokens,
            cached_local_tokens=self.num_local_blocks * self.block_size,
            cached_pool_tokens=self.num_pool_blocks * self.block_size,
            queue_s=admitted_s - self.received_s + started_s - loaded_s,
            load_s=loaded_s - admitted_s,
            compute_s=now_s - started_s,
        )

    def emitted(self, result: SequenceResult, token_id: int, now_s: float) -> TokenEmitted:
        """Return the first token as the gateway gets it."""
        return TokenEmitted(
            attempt=self.attempt,
            seq=self.work.num_output_tokens,
            token_id=token_id,
            logprobs=result.logprobs,
            finish=self.finish(token_id),
            stats=self.stats(now_s),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )

    def finish(self, token_id: int) -> FinishReason | None:
        """Tell whether this token ends the generation."""
        work = self.work
        return finish_reason(work.params, work.num_output_tokens + 1, token_id)


def handed_off(attempt: Attempt) -> bool:
    """Whether nothing is left to do for it."""
    return (
        attempt.phase is Phase.HANDING_OFF
        and not attempt.needs_decode
        and attempt.num_asked == 0
        and all(push.done for push in attempt.pushes.values())
    )


def _known(moment_s: float | None) -> float:
    assert moment_s is not None, "the attempt has not come that far"
    return moment_s
