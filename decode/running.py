"""The running batch: paged blocks, steps, and blocks that become full. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from core.batching import ChunkBatcher
from core.config import DecodeConfig
from core.errors import InvariantError
from core.ids import AttemptId, BlockHash
from core.messages.to_gateway import TokenEmitted
from core.paged import PagedAllocator
from core.requests import finish_reason
from decode import events as ev
from decode.attempts import Attempt, Phase
from decode.batcher import BatchedSequence, DecodeBatcher
from decode.coupled import MixedBatcher
from decode.publishing import PublishQueue
from engine.base import ModelSpec, SequenceResult


class RunningBatch:
    """Attempts from admission to their end; owns all bookkeeping of the paged cache.

    `act` takes an action. One step is under way at a time.
    """

    def __init__(
        self,
        config: DecodeConfig,
        spec: ModelSpec,
        num_blocks: int,
        chunks: ChunkBatcher | None,
        act: Callable[[ev.Action], None],
    ) -> None:
        self.allocator = PagedAllocator(num_blocks)
        self.publishing = PublishQueue(self.allocator)
        self._block_size = spec.block_size
        self._batcher = DecodeBatcher(
            self.allocator, max_batch=config.max_batch, block_size=spec.block_size
        )
        self._mixed: MixedBatcher | None = None
        if chunks is not None:
            self._mixed = MixedBatcher(
                chunks, max_chunk_tokens=config.max_chunk_tokens, block_size=spec.block_size
            )
        self._act = act
        self._step: tuple[tuple[Attempt, int], ...] = ()

    @property
    def computes_prompts(self) -> bool:
        """Whether this is the batch of a coupled worker."""
        return self._mixed is not None

    def admit(self, ready: Iterable[Attempt], now_s: float) -> None:
        """Give room to ready attempts and order their blocks to be loaded, or let them join."""
        by_id = {a.id: a for a in ready}

        def reusable(sequence: BatchedSequence) -> list[BlockHash]:
            attempt = by_id[sequence.attempt]
            return attempt.hashes[: attempt.num_reusable]

        for sequence, num_found in self._batcher.admit(
            [a.sequence for a in by_id.values()], reusable
        ):
            attempt = by_id[sequence.attempt]
            attempt.phase = Phase.LOADING
            attempt.load_started_s = attempt.progress_s = now_s
            attempt.num_local = num_found
            blocks = attempt.leased_prefix(num_found)
            if blocks:
                attempt.busy += 1
                pairs = zip(blocks, sequence.table[num_found:], strict=False)
                to_load = tuple(ev.BlockToLoad(block, block_id) for block, block_id in pairs)
                self._act(ev.LoadBlocks(attempt.id, to_load))
            else:
                self.join(attempt, 0, now_s)

    def join(self, attempt: Attempt, num_loaded: int, now_s: float) -> None:
        """Let an attempt take part in the steps: `num_loaded` blocks were loaded and checked."""
        num_cached = attempt.num_local + num_loaded
        for number in range(attempt.num_local, min(num_cached, attempt.num_full)):
            self.allocator.publish(attempt.sequence.table[number], attempt.hashes[number])
        attempt.phase = Phase.RUNNING
        attempt.load_ended_s = now_s
        attempt.num_loaded = num_loaded
        attempt.num_computed = min(num_cached * self._block_size, attempt.num_known)
        attempt.num_hashed = attempt.num_computed // self._block_size
        if self._mixed is not None and attempt.coupled:
            self._mixed.add(
                attempt.id,
                start=attempt.num_computed,
                end=attempt.num_known,
                priority=attempt.request.priority,
            )

    def remove(self, attempt: Attempt) -> None:
        """Give back an attempt's blocks. Nobody may be working on them."""
        if attempt.in_step or attempt.busy:
            raise InvariantError(f"{attempt.id} is still worked on")
        self.forget_prompt(attempt)
        if self._batcher.is_active(attempt.id):
            self._batcher.remove(attempt.sequence)

    def forget_prompt(self, attempt: Attempt) -> None:
        """Compute nothing more of a prompt; its blocks may still be written by the step."""
        if self._mixed is not None:
            self._mixed.remove(attempt.id)

    # --- steps ---

    def start_step(self, running: Sequence[Attempt], *, loading: bool) -> list[Attempt]:
        """Order the next step unless one is under way; return who was preempted for it.

        `loading` says that an admitted attempt cannot be preempted yet but soon.
        """
        if self._step:
            return []
        by_id = {a.id: a for a in running}
        plan = self._batcher.plan(
            [a.sequence for a in running], blocks_coming=loading or self._gives_blocks_back()
        )
        preempted = [by_id[s.attempt] for s in plan.preempted]
        for attempt in preempted:
            self.forget_prompt(attempt)
        ready = [by_id[s.attempt] for s in plan.run]
        step = [(a, 1) for a in ready if a.num_computed + 1 == len(a.tokens) > a.num_known]
        if self._mixed is not None:
            pieces = self._mixed.next_pieces(len(step))
            step += [(by_id[piece.attempt], piece.num_tokens) for piece in pieces]
        if step:
            self._step = tuple(step)
            for attempt, _ in step:
                attempt.in_step = True
            self._act(ev.RunStep(tuple(attempt.step(count) for attempt, count in step)))
        return preempted

    def _gives_blocks_back(self) -> bool:
        """Whether a publication holds blocks that no sequence holds any more."""
        return any(not self._batcher.is_active(owner) for owner in self.publishing.owners())

    @property
    def step_is_wanted(self) -> bool:
        """Whether anybody in the step under way has not ended."""
        return any(attempt.phase is not Phase.ENDED for attempt, _ in self._step)

    def take_step(self) -> tuple[tuple[Attempt, int], ...]:
        """End the step under way and return who was in it, with the number of tokens."""
        step, self._step = self._step, ()
        if not step:
            raise InvariantError("no step is under way")
        for attempt, _ in step:
            attempt.in_step = False
        return step

    def advance(
        self, attempt: Attempt, num_tokens: int, result: SequenceResult, *, publish: bool,
        now_s: float,
    ) -> TokenEmitted | None:  # fmt: skip
        """Take note of what a step computed; return the token if it sampled one.

        Blocks that became full are known to the paged cache and, with `publish`, queued for the
        pool.
        """
        attempt.num_computed += num_tokens
        attempt.extend_hashes()
        table, hashes = attempt.sequence.table, attempt.hashes
        while attempt.num_hashed < attempt.num_computed // self._block_size:
            number = attempt.num_hashed
            self.allocator.publish(table[number], hashes[number])
            if publish:
                self.publishing.add(attempt.id, hashes[number], table[number])
            attempt.num_hashed += 1
        attempt.prompt_logprobs += result.prompt_logprobs
        if result.token_id is None:
            return None
        attempt.tokens.append(result.token_id)
        # The token's own position is computed, and needs its block, in the next step.
        attempt.sequence.num_positions = len(attempt.tokens)
        stats = attempt.stats(now_s)
        about_prompt, attempt.prompt_logprobs = tuple(attempt.prompt_logprobs), []
        return TokenEmitted(
            attempt=attempt.id,
            seq=attempt.num_output - 1,
            token_id=result.token_id,
            logprobs=result.logprobs,
            finish=finish_reason(attempt.request.params, attempt.num_output, result.token_id),
            stats=stats,
            prompt_logprobs=about_prompt,
        )

    def validate(self, attempts: Iterable[Attempt]) -> None:
        """Re-derive who holds which block. Raises `InvariantError`."""
        self._batcher.validate(self.publishing.held_blocks)
        everyone = {a.id: a for a in attempts}
        for attempt, _ in self._step:
            if not attempt.in_step or attempt.id not in everyone:
                raise InvariantError(f"{attempt.id} is in the step but not known")
        in_step: set[AttemptId] = {a.id for a, _ in self._step}
        for attempt in everyone.values():
            admitted = self._batcher.is_active(attempt.id)
            if attempt.in_step != (attempt.id in in_step) or (attempt.in_step and not admitted):
                raise InvariantError(f"{attempt.id}: who is in the step is not clear")
            if admitted != bool(attempt.sequence.table):
                raise InvariantError(f"{attempt.id} holds blocks outside the batch, or none in it")
            if attempt.phase in (Phase.LOADING, Phase.RUNNING) and not admitted:
                raise InvariantError(f"{attempt.id} is {attempt.phase} without blocks")
            if attempt.phase is Phase.RUNNING and attempt.num_computed >= len(attempt.tokens):
                raise InvariantError(f"{attempt.id} has nothing to compute")
