"""Plays the shell for a `PrefillState`, and watches every byte of the paged cache.

A cell is one position of one layer of a paged block; its content is the tuple of tokens up to that
position. What is read by a chunk or written to a slot must be what the request says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from core.config import PrefillConfig
from core.hashing import extend_block_hashes
from core.ids import (
    Address,
    AttemptId,
    BlockHash,
    Incarnation,
    PoolRef,
    RequestId,
    SlotHandle,
    WorkerRef,
)
from core.messages.to_conductor import BlockSource
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.messages.to_pool import AlreadyCommitted, LeasedBlock, SlotReserved
from core.messages.to_prefill import SlotForBlock
from core.requests import SamplingParams
from engine.base import SequenceResult, SequenceStep
from engine.toy import toy_spec
from prefill import events as ev
from prefill.state import PrefillState

BLOCK = 4
LAYERS = 2
SPEC = toy_spec(block_size=BLOCK, num_layers=LAYERS, max_model_len=64)
ROOT = BlockHash(bytes(32))
GATEWAY = Incarnation("gateway-1")
TOKEN = 77


def pool(name: str) -> PoolRef:
    return PoolRef(name, Incarnation(f"{name}-1"), Address("127.0.0.1", 1))


OWN, OTHER = pool("own"), pool("other")


def worker(name: str, at: PoolRef = OTHER) -> WorkerRef:
    return WorkerRef(name, Incarnation(f"{name}-1"), Address("127.0.0.1", 2), at)


DECODE = worker("decode")
LOCAL_DECODE = worker("local-decode", OWN)


def name(counter: int, attempt: int = 1, gateway: Incarnation = GATEWAY) -> AttemptId:
    return AttemptId(RequestId(gateway, counter), attempt)


def work(
    attempt: AttemptId,
    token_ids: tuple[int, ...],
    *,
    decode: WorkerRef | None = DECODE,
    sources: tuple[BlockSource, ...] = (),
    reusable: int | None = None,
    num_output_tokens: int = 0,
    params: SamplingParams | None = None,
    priority: int = 0,
) -> ev.PrefillWork:
    hashes = tuple(extend_block_hashes(ROOT, token_ids, BLOCK))
    return ev.PrefillWork(
        attempt=attempt,
        token_ids=token_ids,
        num_output_tokens=num_output_tokens,
        block_hashes=hashes,
        num_reusable_blocks=len(hashes) if reusable is None else reusable,
        params=params or SamplingParams(max_tokens=10),
        sources=sources,
        decode=decode,
        priority=priority,
    )


@dataclass
class Seen:
    """What the worker told others."""

    tokens: dict[AttemptId, TokenEmitted] = field(default_factory=dict)
    failures: dict[AttemptId, FailureCode] = field(default_factory=dict)
    finished: list[ev.SendPrefillFinished] = field(default_factory=list)
    gone: list[ev.SendPrefillGone] = field(default_factory=list)
    closed: list[AttemptId] = field(default_factory=list)


class Driver:
    def __init__(self, num_blocks: int = 12, **config) -> None:
        config = {"max_chunk_tokens": 8, "max_chunk_requests": 2, **config}
        self.state = PrefillState(PrefillConfig(**config), SPEC, num_blocks)
        self.now_s = 0.0
        self.seen = Seen()
        self.waiting: list[ev.PoolAction] = []
        self.chunk: ev.RunChunk | None = None
        self.layers_done = 0
        self.abandoned = False
        self.steps: list[SequenceStep] = []
        self.cells: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.works: dict[AttemptId, ev.PrefillWork] = {}
        self.tokens_of: dict[BlockHash, tuple[int, ...]] = {}
        self.hash_of: dict[SlotHandle, BlockHash] = {}
        self.place_of: dict[SlotHandle, tuple[AttemptId, int]] = {}
        self.written: dict[SlotHandle, set[int]] = {}
        self.over: set[SlotHandle] = set()
        self.num_handles = 0
        self.pool_blocks: dict[Incarnation, set[BlockHash]] = {}
        self.actions: list[ev.Action] = []

    # --- events ---

    def do(self, event: ev.Event) -> list[ev.Action]:
        if isinstance(event, ev.RequestReceived):
            self.learn(event.work)
        actions = self.state.handle(event, self.now_s)
        self.actions += actions
        for action in actions:
            self.take(action)
        self.state.validate()
        return actions

    def learn(self, request: ev.PrefillWork) -> None:
        self.works.setdefault(request.attempt, request)
        for index, block_hash in enumerate(request.block_hashes):
            self.tokens_of[block_hash] = request.token_ids[: (index + 1) * BLOCK]

    def request(self, attempt: AttemptId, token_ids: tuple[int, ...], **more) -> list[ev.Action]:
        return self.do(ev.RequestReceived(work(attempt, token_ids, **more)))

    def slots(self, attempt, indices, *, decode=DECODE, at=None) -> list[ev.Action]:
        at = at or decode.pool
        slots = tuple(SlotForBlock(i, self.handle(at, attempt, i)) for i in indices)
        return self.do(ev.DecodeSlotsReceived(attempt, decode.incarnation, at, slots))

    def handle(self, at: PoolRef, attempt: AttemptId, index: int) -> SlotHandle:
        self.num_handles += 1
        handle = SlotHandle(0, self.num_handles, at.incarnation, 1)
        self.place_of[handle] = (attempt, index)
        return handle

    def leased(self, block_hash: BlockHash) -> LeasedBlock:
        self.num_handles += 1
        handle = SlotHandle(0, self.num_handles, OWN.incarnation, 1)
        self.hash_of[handle] = block_hash
        return LeasedBlock(handle, 1)

    # --- answers ---

    def answer(self, action: ev.PoolAction | None = None, *, ok: bool = True, good: int = 0):
        """Answer the oldest (or that) waiting operation."""
        action = action or self.waiting[0]
        self.waiting.remove(action)
        match action:
            case ev.LeasePrefix() | ev.FetchPrefix():
                return self.do(self.found(action) if ok else ev.PrefixUnavailable(action.attempt))
            case ev.LoadBlocks():
                good = len(action.blocks) if ok else min(good, len(action.blocks) - 1)
                for leased, block_id in list(zip(action.blocks, action.block_ids, strict=True))[
                    :good
                ]:
                    self.fill(block_id, self.tokens_of[self.hash_of[leased.handle]])
                if ok:
                    return self.do(ev.PrefixBlocksLoaded(action.attempt))
                return self.do(ev.PrefixBlockBroken(action.attempt, good))
            case ev.ReserveOwnSlots():
                if not ok:
                    return self.do(ev.ReservationFailed(action.attempt))
                return self.do(self.reserved(action))
            case ev.BeginWrites():
                accepted = tuple(ok or i % 2 == 0 for i in range(len(action.handles)))
                for handle, yes in zip(action.handles, accepted, strict=True):
                    if yes:
                        self.written[handle] = set()
                incarnation = action.pool.incarnation
                return self.do(ev.WritesBegun(action.attempt, incarnation, accepted))
            case ev.WriteBlocks():
                if not ok:
                    return self.do(ev.WritesFailed(action.attempt, action.pool.incarnation))
                for part in action.slices:
                    for block_id, handle in zip(part.block_ids, part.handles, strict=True):
                        self.check_slice(block_id, part.layer, handle)  # not reused meanwhile
                        self.written[handle].add(part.layer)
                return self.do(ev.SlicesWritten(action.attempt, action.pool.incarnation))
            case ev.CommitBlocks():
                for handle in action.handles:
                    attempt, index = self.place_of[handle]
                    hashes = self.works[attempt].block_hashes
                    if ok and index < len(hashes):
                        known = self.pool_blocks.setdefault(action.pool.incarnation, set())
                        known.add(hashes[index])
                accepted = (ok,) * len(action.handles)
                incarnation = action.pool.incarnation
                return self.do(ev.BlocksCommitted(action.attempt, incarnation, accepted))

    def found(self, action: ev.LeasePrefix | ev.FetchPrefix) -> ev.Event:
        where = OWN if isinstance(action, ev.LeasePrefix) else action.source
        blocks = []
        for block_hash in action.block_hashes:
            if block_hash not in self.pool_blocks.get(where.incarnation, set()):
                break
            blocks.append(self.leased(block_hash))
        kind = ev.PrefixLeased if isinstance(action, ev.LeasePrefix) else ev.PrefixFetched
        return kind(action.attempt, tuple(blocks))

    def reserved(self, action: ev.ReserveOwnSlots) -> ev.Event:
        hashes = self.works[action.attempt].block_hashes
        known = self.pool_blocks.get(OWN.incarnation, set())
        outcomes = tuple(
            AlreadyCommitted(self.leased(h))
            if h in known
            else SlotReserved(self.handle(OWN, action.attempt, hashes.index(h)))
            for h in action.block_hashes
        )
        return ev.SlotsReserved(action.attempt, OWN, outcomes)

    def layer(self) -> None:
        """Compute one layer of the running chunk, or end it after the last one."""
        assert self.chunk is not None
        if self.layers_done < LAYERS:
            for step in self.chunk.steps:
                whole = self.whole(step)
                for position in range(step.start, step.start + len(step.token_ids)):
                    key = (step.block_ids[position // BLOCK], self.layers_done, position % BLOCK)
                    self.cells[key] = whole[: position + 1]
            self.layers_done += 1
            self.do(ev.LayerComputed(self.layers_done - 1))
            return
        steps, self.chunk = self.chunk.steps, None
        results = tuple(SequenceResult(TOKEN if step.sample else None) for step in steps)
        self.do(ev.ChunkComputed(results))

    def fail_chunk(self) -> None:
        self.chunk = None
        self.do(ev.EngineFailed("boom"))

    def abandon_chunk(self) -> None:
        assert self.abandoned
        self.chunk = None
        self.do(ev.ChunkAbandoned())

    def run(self, limit: int = 1000) -> None:
        """Answer everything, well, until nothing waits."""
        for _ in range(limit):
            if self.waiting:
                self.answer()
            elif self.chunk is not None:
                self.layer()
            else:
                return
        raise AssertionError("it never ends")

    # --- watching ---

    def whole(self, step) -> tuple[int, ...]:
        """Find the tokens of the request that a step belongs to."""
        before = self.prefix(step.block_ids, step.start)
        return before + tuple(step.token_ids)

    def prefix(self, block_ids, num_tokens: int) -> tuple[int, ...]:
        """Read back, from every layer, what a chunk relies on."""
        if num_tokens == 0:
            return ()
        last = num_tokens - 1
        tokens = self.cells[block_ids[last // BLOCK], 0, last % BLOCK]
        assert len(tokens) == num_tokens
        for position in range(num_tokens):
            for layer in range(LAYERS):
                cell = self.cells[block_ids[position // BLOCK], layer, position % BLOCK]
                assert cell == tokens[: position + 1], "the chunk would read something else"
        return tokens

    def fill(self, block_id: int, tokens: tuple[int, ...]) -> None:
        first = len(tokens) - BLOCK
        for layer in range(LAYERS):
            for offset in range(BLOCK):
                self.cells[block_id, layer, offset] = tokens[: first + offset + 1]

    def check_slice(self, block_id: int, layer: int, handle: SlotHandle) -> None:
        attempt, index = self.place_of[handle]
        tokens = self.works[attempt].token_ids
        for position in range(index * BLOCK, min((index + 1) * BLOCK, len(tokens))):
            cell = self.cells.get((block_id, layer, position % BLOCK))
            assert cell == tokens[: position + 1], "wrong bytes would go into the slot"

    def take(self, action: ev.Action) -> None:
        match action:
            case ev.RunChunk():
                assert self.chunk is None
                self.chunk, self.layers_done, self.abandoned = action, 0, False
                self.steps += action.steps
                tables = Counter(b for step in action.steps for b in set(step.block_ids))
                for step in action.steps:
                    self.whole(step)
                    new = {
                        step.block_ids[p // BLOCK]
                        for p in range(step.start, step.start + len(step.token_ids))
                    }
                    assert all(tables[b] == 1 for b in new), "written by one, read by another"
            case ev.AbandonChunk():
                assert self.chunk is not None and not self.abandoned
                self.abandoned = True
            case ev.ZeroBlock():
                for layer in range(LAYERS):
                    for offset in range(BLOCK):
                        self.cells.pop((action.block_id, layer, offset), None)
            case ev.EndWrites():
                for handle in action.handles:
                    assert handle in self.written
                    self.over.add(handle)
            case ev.CloseTransfer():
                for waiting in self.waiting:
                    asks = isinstance(waiting, ev.LeasePrefix | ev.FetchPrefix | ev.ReserveOwnSlots)
                    assert asks or waiting.attempt != action.attempt, "its blocks are in use"
                self.seen.closed.append(action.attempt)
            case ev.SendTokens():
                for token in action.tokens:
                    assert token.attempt not in self.seen.tokens
                    assert token.attempt not in self.seen.failures
                    self.check_stats(token)
                    self.seen.tokens[token.attempt] = token
            case ev.SendFailure():
                assert action.attempt not in self.seen.failures
                self.seen.failures[action.attempt] = action.code
            case ev.SendPrefillFinished():
                self.seen.finished.append(action)
            case ev.SendPrefillGone():
                self.seen.gone.append(action)
            case _:
                self.take_pool(action)

    def take_pool(self, action: ev.PoolAction) -> None:
        if isinstance(action, ev.BeginWrites | ev.WriteBlocks | ev.CommitBlocks):
            assert not any(
                isinstance(w, ev.BeginWrites | ev.WriteBlocks | ev.CommitBlocks)
                and (w.attempt, w.pool) == (action.attempt, action.pool)
                for w in self.waiting
            ), "one operation at a time"
        match action:
            case ev.WriteBlocks():
                for part in action.slices:
                    for block_id, handle in zip(part.block_ids, part.handles, strict=True):
                        assert handle in self.written and handle not in self.over
                        assert part.layer not in self.written[handle]
                        self.check_slice(block_id, part.layer, handle)
            case ev.CommitBlocks():
                for handle in action.handles:
                    assert self.written[handle] == set(range(LAYERS))
                    assert handle not in self.over
                    self.over.add(handle)
            case _:
                pass
        self.waiting.append(action)

    def check_stats(self, token: TokenEmitted) -> None:
        assert token.stats is not None
        stats, num_tokens = token.stats, len(self.works[token.attempt].token_ids)
        cached = stats.cached_local_tokens + stats.cached_pool_tokens
        assert stats.computed_tokens + cached == num_tokens
        assert cached <= num_tokens - 1 and cached % BLOCK == 0
        assert cached <= BLOCK * self.works[token.attempt].num_reusable_blocks
        assert min(stats.queue_s, stats.load_s, stats.compute_s) >= 0
