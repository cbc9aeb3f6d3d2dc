"""What the choices are between: every worker with predicted times for one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.config import ConductorConfig
from core.ids import Incarnation
from core.messages.to_conductor import BlockSource, PlaceRequest
from scheduler.cluster_view import ClusterView, WorkerEntry
from scheduler.decode_choice import DecodeCandidate
from scheduler.estimates import Estimates
from scheduler.policies import Candidate, Choice


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Blocks of the request's prefix that pool nodes hold, and who holds most, by registration."""

    held: Mapping[Incarnation, int]
    best_blocks: int
    holders: tuple[Incarnation, ...]


def reusable_prefixes(
    view: ClusterView, found: Mapping[Incarnation, int], request: PlaceRequest, block_size: int
) -> Prefixes:
    """Cut what the directory found to what can be reused: the last token is always computed."""
    most = (request.num_tokens - 1) // block_size
    held = {pool: min(found[pool], most) for pool in view.pools if pool in found}
    best = max(held.values(), default=0)
    holders = tuple(pool for pool, blocks in held.items() if blocks == best) if best else ()
    return Prefixes(held, best, holders)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Turns workers into candidates. Changes nothing."""

    view: ClusterView
    estimates: Estimates
    config: ConductorConfig

    def prefill_candidates(
        self,
        now_s: float,
        request: PlaceRequest,
        workers: Iterable[WorkerEntry],
        prefixes: Prefixes,
    ) -> list[Candidate]:
        """Predict queue, transfer and compute times of each worker."""
        return [self._prefill_candidate(now_s, request, w, prefixes) for w in workers]

    def _prefill_candidate(
        self, now_s: float, request: PlaceRequest, worker: WorkerEntry, prefixes: Prefixes
    ) -> Candidate:
        pool = worker.ref.pool.incarnation
        local, best = prefixes.held.get(pool, 0), prefixes.best_blocks
        holder = self.best_holder(pool, prefixes)
        num_bytes = (best - local) * self._block_bytes(pool)
        return Candidate(
            worker=worker.ref.incarnation,
            queue_s=self._queue_s(now_s, worker),
            local_blocks=local,
            local_prefill_s=self._prefill_s(request, worker, local),
            best_blocks=best,
            best_prefill_s=self._prefill_s(request, worker, best),
            transfer_s=0.0
            if holder is None or holder == pool
            else self.estimates.transfer_s(holder, pool, num_bytes),
        )

    def best_holder(self, pool: Incarnation, prefixes: Prefixes) -> Incarnation | None:
        """Return the holder of the longest prefix to read from: the node itself, else the fastest.

        `None` when nobody holds anything. The first of equally fast ones wins.
        """
        if pool in prefixes.holders:
            return pool
        return min(
            prefixes.holders,
            key=lambda node: self.estimates.transfer_s(node, pool, 1),
            default=None,
        )

    def sources(
        self, worker: WorkerEntry, choice: Choice, prefixes: Prefixes
    ) -> tuple[BlockSource, ...]:
        """Name a holder of each reused block, in contiguous ranges from block 0.

        The worker's own pool node comes first, for what it has; the prefill side skips that
        range, the decode side's pool node may read it from there.
        """
        pool = worker.ref.pool.incarnation
        local = choice.candidate.local_blocks
        ranges = []
        if local:
            ranges.append(BlockSource(self.view.pools[pool].ref, 0, local))
        holder = self.best_holder(pool, prefixes) if choice.fetch else None
        if holder is not None:
            count = choice.candidate.best_blocks - local
            ranges.append(BlockSource(self.view.pools[holder].ref, local, count))
        return tuple(ranges)

    def decode_candidates(
        self, request: PlaceRequest, workers: Iterable[WorkerEntry]
    ) -> list[DecodeCandidate]:
        """Predict step time and memory of each worker with this request in its batch."""
        return [self._decode_candidate(request, worker) for worker in workers]

    def _decode_candidate(self, request: PlaceRequest, worker: WorkerEntry) -> DecodeCandidate:
        capacity, load = worker.capacity, worker.decode_load
        num_sequences, context_tokens = len(worker.decoding), worker.context_tokens
        free_blocks = capacity.num_blocks - worker.promised_blocks
        if load is not None:
            free_blocks = min(free_blocks, load.free_blocks - worker.unstarted_blocks)
            if worker.num_restored:
                num_sequences = max(num_sequences, load.num_running + load.num_waiting)
                context_tokens = max(context_tokens, load.context_tokens)
        num_sequences += 1
        context_tokens += self.context_tokens(request)
        running = min(num_sequences, capacity.max_batch)
        step_context_tokens = context_tokens * running // num_sequences
        return DecodeCandidate(
            worker=worker.ref.incarnation,
            num_sequences=num_sequences,
            max_batch=capacity.max_batch,
            free_blocks=free_blocks,
            needed_blocks=self.decode_blocks(request, worker),
            tbt_s=self.estimates.step_s(worker.ref.incarnation, running, step_context_tokens),
        )

    def context_tokens(self, request: PlaceRequest) -> int:
        """Predict the mean context of a request while it decodes."""
        return request.num_tokens + self.estimates.output_tokens(request.num_new_tokens) // 2

    def decode_blocks(self, request: PlaceRequest, worker: WorkerEntry) -> int:
        """Predict the blocks that a request grows to on this worker."""
        tokens = request.num_tokens + self.estimates.output_tokens(request.num_new_tokens)
        return -(-tokens // worker.capacity.block_size)

    def _prefill_s(self, request: PlaceRequest, worker: WorkerEntry, prefix_blocks: int) -> float:
        cached_tokens = prefix_blocks * self.config.block_size
        return self.estimates.prefill_s(
            worker.ref.incarnation, request.num_tokens - cached_tokens, cached_tokens
        )

    def _queue_s(self, now_s: float, worker: WorkerEntry) -> float:
        """Predict the wait; what the worker reports stands in where sizes are unknown."""
        queue_s = self.view.queue_s(now_s, worker)
        load = worker.prefill_load
        if load is not None and worker.num_restored:
            reported_s = self.estimates.prefill_s(worker.ref.incarnation, load.queued_tokens, 0)
            queue_s = max(queue_s, reported_s)
        return queue_s

    def _block_bytes(self, pool: Incarnation) -> int:
        entry = self.view.pools.get(pool)
        return self.config.block_bytes if entry is None else entry.slot_bytes
