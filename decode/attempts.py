"""What a decode worker knows of one attempt, and of the past of its request. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from core.hashing import extend_block_hashes, split_hashes, unpack_token_ids
from core.ids import AttemptId, BlockHash, PoolRef, RequestId, SlotHandle
from core.messages.to_conductor import BlockSource
from core.messages.to_decode import DecodeRequest
from core.messages.to_gateway import PrefillStats
from core.messages.to_pool import LeasedBlock
from core.requests import PositionLogprobs
from decode.batcher import BatchedSequence
from engine.base import SampleRequest, SequenceStep

MAX_REMEMBERED = 16_384


class Phase(StrEnum):
    """Where an attempt is; see `decode.state`."""

    PREPARING = "preparing"
    RECEIVING = "receiving"
    READY = "ready"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Past:
    """What outlives an attempt: the highest one seen, its age, and how often it gave way."""

    attempt: int
    arrival: int
    num_preempted: int = 0


class PastRequests:
    """The pasts of the `MAX_REMEMBERED` requests heard of last."""

    def __init__(self) -> None:
        self._pasts: OrderedDict[RequestId, Past] = OrderedDict()
        self._next_arrival = 0

    def of(self, request: RequestId) -> Past:
        """Return the past of a request, a new one if it is unknown or forgotten."""
        past = self._pasts.get(request)
        if past is None:
            past = self._pasts[request] = Past(attempt=0, arrival=self._next_arrival)
            self._next_arrival += 1
            if len(self._pasts) > MAX_REMEMBERED:
                self._pasts.popitem(last=False)
        self._pasts.move_to_end(request)
        return past


@dataclass(slots=True)
class Attempt:
    """One attempt. Block numbers count the request's blocks from 0.

    `prompt` is the client's own, `tokens` are prompt and outputs; the KV of the first
    `num_computed` of them is in the paged cache once the attempt runs. `hashes` are those of full
    blocks as far as they are known. `busy` counts orders (to the pool, the loader) without an
    outcome yet: until it is 0 and the attempt is in no step, neither its slots nor its paged
    blocks may be given back.
    """

    request: DecodeRequest
    sequence: BatchedSequence
    prompt: tuple[int, ...]
    tokens: list[int]
    num_known: int
    hashes: list[BlockHash]
    block_size: int
    arrived_s: float
    progress_s: float
    phase: Phase = Phase.PREPARING
    busy: int = 0
    in_step: bool = False
    transfer_open: bool = True
    first_token_id: int | None = None
    greeted: bool = False
    leased: dict[int, LeasedBlock] = field(default_factory=dict)
    awaited: dict[SlotHandle, int] = field(default_factory=dict)
    unreserved: set[int] = field(default_factory=set)
    asked: list[PoolRef] = field(default_factory=list)
    num_losses: int = 0
    num_computed: int = 0
    num_hashed: int = 0
    num_local: int = 0
    num_loaded: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    load_started_s: float = 0.0
    load_ended_s: float = 0.0
    stats_sent: bool = False

    @classmethod
    def of(cls, request: DecodeRequest, past: Past, block_size: int, now_s: float) -> Attempt:
        """Make the record of a request that just came. Raises `ValueError` if it is malformed."""
        tokens = list(unpack_token_ids(request.token_ids))
        num_prompt = len(tokens) - request.num_output_tokens
        hashes = split_hashes(request.block_hashes)
        if num_prompt < 1 or request.num_output_tokens < 0:
            raise ValueError(f"{num_prompt} prompt and {request.num_output_tokens} output tokens")
        if len(hashes) != len(tokens) // block_size:
            raise ValueError(f"{len(hashes)} hashes for {len(tokens)} tokens")
        # The last output needs no KV: nothing is computed after it.
        most = max(len(tokens), num_prompt + request.params.max_tokens - 1)
        sequence = BatchedSequence(
            attempt=request.attempt,
            arrival=past.arrival,
            num_preempted=past.num_preempted,
            # A coupled worker computes the last known token, others the one sampled by prefill.
            num_positions=len(tokens) + (request.prefill is not None),
            max_blocks=-(-most // block_size),
        )
        return cls(
            request=request,
            sequence=sequence,
            prompt=tuple(tokens[:num_prompt]),
            tokens=tokens,
            num_known=len(tokens),
            hashes=hashes,
            block_size=block_size,
            arrived_s=now_s,
            progress_s=now_s,
        )

    @property
    def id(self) -> AttemptId:
        """The attempt's name."""
        return self.request.attempt

    @property
    def coupled(self) -> bool:
        """Whether this worker computes the known tokens itself."""
        return self.request.prefill is None

    @property
    def num_output(self) -> int:
        """Outputs so far, over all attempts."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_full(self) -> int:
        """Full blocks of the known tokens."""
        return self.num_known // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the known tokens: the full ones and, maybe, a tail."""
        return -(-self.num_known // self.block_size)

    @property
    def num_reusable(self) -> int:
        """Blocks that may come from a cache: all for decode, bounded for a coupled worker.

        A coupled worker always computes the last known token.
        """
        if not self.coupled:
            return self.num_full
        return min(self.request.num_reusable_blocks, (self.num_known - 1) // self.block_size)

    @property
    def all_here(self) -> bool:
        """Whether every block of the known tokens is readable in the pool node."""
        return len(self.leased) == self.num_blocks

    def sources_elsewhere(self, own: PoolRef | None) -> list[tuple[BlockSource, range]]:
        """Return the sources other than `own`, each with the numbers of the blocks to fetch."""
        taken: set[int] = set()
        found: list[tuple[BlockSource, range]] = []
        for source in self.request.sources:
            stop = min(source.first + source.count, self.num_reusable)
            numbers = range(source.first, stop)
            if source.pool != own and numbers and taken.isdisjoint(numbers):
                taken.update(numbers)
                found.append((source, numbers))
        return found

    def leased_prefix(self, first: int) -> list[LeasedBlock]:
        """Return the leased blocks from number `first` on, up to the first gap."""
        blocks: list[LeasedBlock] = []
        while (block := self.leased.get(first + len(blocks))) is not None:
            blocks.append(block)
        return blocks

    def extend_hashes(self) -> None:
        """Hash the blocks that have become full of computed tokens."""
        start = len(self.hashes) * self.block_size
        parent = self.hashes[-1] if self.hashes else BlockHash(self.request.root)
        self.hashes += extend_block_hashes(
            parent, self.tokens[start : self.num_computed], self.block_size
        )

    def step(self, num_tokens: int) -> SequenceStep:
        """Return the part of an engine step that computes the next `num_tokens` tokens."""
        start, end = self.num_computed, self.num_computed + num_tokens
        params = self.request.params
        sample = None
        if end == len(self.tokens):
            outputs = tuple(self.tokens[len(self.prompt) :])
            sample = SampleRequest(params, self.prompt, outputs)
        # Prompt logprobs were reported by the first attempt that emitted a token.
        wants_prompt = start < len(self.prompt) - 1 and self.request.num_output_tokens == 0
        return SequenceStep(
            token_ids=tuple(self.tokens[start:end]),
            start=start,
            block_ids=tuple(self.sequence.table),
            sample=sample,
            prompt_logprobs=params.prompt_logprobs if wants_prompt else None,
            next_token_ids=self.prompt[start + 1 : end + 1] if wants_prompt else (),
        )

    def stats(self, now_s: float) -> PrefillStats | None:
        """Return what a coupled worker reports with its first token, once."""
        if not self.coupled or self.stats_sent:
            return None
        self.stats_sent = True
        local, loaded = self.num_local * self.block_size, self.num_loaded * self.block_size
        return PrefillStats(
            computed_tokens=self.num_known - local - loaded,
            cached_local_tokens=local,
            cached_pool_tokens=loaded,
            queue_s=self.load_started_s - self.arrived_s,
            load_s=self.load_ended_s - self.load_started_s,
            compute_s=now_s - self.load_ended_s,
        )
