"""A world around `DecodeState` without sockets: pool, prefill worker and gateway, all in order of
a seeded random generator, and a real toy engine whose tokens betray every wrong block."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from core.batching import ChunkBatcher
from core.config import DecodeConfig
from core.hashing import (
    HashRoot,
    extend_block_hashes,
    join_hashes,
    pack_token_ids,
    unpack_token_ids,
)
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
from core.messages.to_decode import DecodeRequest, PrefillFinished
from core.messages.to_gateway import FailureCode, TokenEmitted
from core.messages.to_pool import (
    AlreadyCommitted,
    LeasedBlock,
    ReserveOutcome,
    SlotReserved,
    SlotsExhausted,
)
from core.requests import SamplingParams
from decode import events as ev
from decode.state import DecodeState
from engine.base import ModelSpec, SequenceStep, StepAbandoned
from engine.toy import ToyEngine, toy_generate, toy_spec

SPEC = toy_spec(block_size=4, vocab_size=64, num_layers=2, max_model_len=512)
ROOT = HashRoot("toy", "none", "uint8", "toy", SPEC.block_size).digest()
GATEWAY = Incarnation("gateway-1")
POOL = PoolRef("pool", Incarnation("pool-1"), Address("127.0.0.1", 1))
OTHER_POOL = PoolRef("other", Incarnation("pool-2"), Address("127.0.0.1", 2))
PREFILL = WorkerRef("p0", Incarnation("prefill-1"), Address("127.0.0.1", 3), OTHER_POOL)


def params(max_tokens: int, **more: object) -> SamplingParams:
    return replace(SamplingParams(max_tokens=max_tokens), **more)  # type: ignore[arg-type]


def make_request(
    prompt: list[int],
    outputs: list[int],
    sampling: SamplingParams,
    *,
    counter: int = 1,
    attempt: int = 1,
    prefill: WorkerRef | None = PREFILL,
    num_fetched: int = 0,
    gateway: Incarnation = GATEWAY,
    spec: ModelSpec = SPEC,
    root: BlockHash = ROOT,
) -> DecodeRequest:
    """The message a gateway would send; the first `num_fetched` blocks are at `OTHER_POOL`."""
    tokens = prompt + outputs
    hashes = extend_block_hashes(root, tokens, spec.block_size)
    return DecodeRequest(
        attempt=AttemptId(RequestId(gateway, counter), attempt),
        token_ids=pack_token_ids(tokens),
        num_output_tokens=len(outputs),
        block_hashes=join_hashes(hashes),
        root=root,
        num_reusable_blocks=len(hashes),
        params=sampling,
        sources=(BlockSource(OTHER_POOL, 0, num_fetched),) if num_fetched else (),
        prefill=prefill,
        priority=0,
    )


def compute_blocks(tokens: list[int], spec: ModelSpec = SPEC) -> list[bytes]:
    """The bytes of all blocks of `tokens`, the tail zero beyond its tokens."""
    count = -(-len(tokens) // spec.block_size)
    engine = ToyEngine(spec, count)
    engine.step([SequenceStep(tokens, 0, range(count))])
    return [bytes(engine.read_block(i)) for i in range(count)]


class World:
    """Runs requests to their end; `step_one` lets one outstanding thing happen."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 64,
        config: DecodeConfig | None = None,
        chunks: ChunkBatcher | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.engine = ToyEngine(SPEC, num_blocks)
        self.state = DecodeState(config or DecodeConfig(), SPEC, num_blocks, chunks)
        self.coupled = chunks is not None
        self.now_s = 0.0
        self.pending: list[Callable[[], None]] = []
        self.pool: dict[BlockHash, bytes] = {}
        self.slots: dict[SlotHandle, tuple[bytes, BlockHash | None]] = {}
        self.transfers: set[AttemptId] = set()
        self.closed: set[AttemptId] = set()
        self.requests: dict[AttemptId, DecodeRequest] = {}
        self.prompts: dict[RequestId, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.tokens: list[TokenEmitted] = []
        self.failures: list[ev.SendFailure] = []
        self.finished: set[RequestId] = set()
        self.released: set[AttemptId] = set()
        self.loss_rate = self.exhaustion_rate = self.corruption_rate = 0.0
        self.retry = True
        self.num_steps = 0
        self.abandoned = False
        self._newest: dict[RequestId, int] = {}
        self._pool_life = 100
        self._told: set[AttemptId] = set()
        self._next_slot = 0
        self.handle(ev.PoolConnected(POOL))

    # --- driving ---

    def submit(self, counter: int, prompt: list[int], sampling: SamplingParams) -> RequestId:
        request = RequestId(GATEWAY, counter)
        self.prompts[request] = (prompt, sampling)
        self.outputs[request] = []
        self._place(request, 1)
        return request

    def _place(self, request: RequestId, attempt: int) -> None:
        prompt, sampling = self.prompts[request]
        outputs = list(self.outputs[request])
        message = make_request(
            prompt,
            outputs,
            sampling,
            counter=request.counter,
            attempt=attempt,
            prefill=None if self.coupled else PREFILL,
            num_fetched=self.random.randint(0, len(prompt) // SPEC.block_size),
        )
        self.requests[message.attempt] = message
        self._newest[request] = attempt
        self.later(lambda: self.handle(ev.RequestReceived(message)))
        if self.random.random() < 0.2:
            self.later(lambda: self.handle(ev.RequestReceived(message)))
        if not self.coupled and self.random.random() < 0.5:
            self._tell_first_token(message.attempt)

    def later(self, happen: Callable[[], None]) -> None:
        self.pending.append(happen)

    def step_one(self) -> bool:
        if not self.pending:
            return False
        self.pending.pop(self.random.randrange(len(self.pending)))()
        return True

    def lose_pool(self) -> None:
        """The pool node dies with all it has, and another life of it comes up."""
        self.pool.clear()
        self._pool_life += 1
        life = Incarnation(f"pool-{self._pool_life}")
        self.handle(ev.PoolLost())
        self.handle(ev.PoolConnected(replace(POOL, incarnation=life)))

    def run(self, max_events: int = 200_000) -> None:
        for _ in range(max_events):
            if not self.step_one():
                if not self.state.attempts():
                    return
                self.now_s += 0.1
                self.handle(ev.TimePassed())
        raise AssertionError(f"never ends: {self.state.counters()}")

    def handle(self, event: ev.Event) -> None:
        self.now_s += 0.001
        actions = self.state.handle(event, self.now_s)
        self.state.validate()
        for action in actions:
            self._execute(action)

    # --- what the actions do ---

    def _execute(self, action: ev.Action) -> None:
        match action:
            case ev.ReserveSlots():
                self.transfers.add(action.attempt)
                self.later(partial(self._reserve, action, self._pool_life))
            case ev.FetchPrefix():
                self.transfers.add(action.attempt)
                self.later(partial(self._fetch, action, self._pool_life))
            case ev.SendDecodeSlots():
                for slot in action.slots:
                    self._prefill_writes(action.attempt, slot.index, slot.handle)
                self._tell_first_token(action.attempt)
            case ev.SendRelease():
                assert action.attempt not in self.released
                self.released.add(action.attempt)
            case ev.LoadBlocks():
                self.later(lambda: self._load(action))
            case ev.RunStep():
                self.abandoned = False
                self.later(lambda: self._run_step(action))
            case ev.AbandonStep():
                assert not self.abandoned
                self.abandoned = True
            case ev.SendTokens():
                for token in action.tokens:
                    self._stream(token)
            case ev.SendFailure():
                self._take_failure(action)
            case ev.PublishBlocks():
                self.later(partial(self._publish, action, self._pool_life))
            case ev.ReportCorrupt():
                block_hash = self.slots[action.handle][1]
                if block_hash is not None:
                    self.pool.pop(block_hash, None)
            case ev.CloseTransfer():
                assert action.attempt not in self.closed, "closed twice"
                self.closed.add(action.attempt)
                self.transfers.discard(action.attempt)

    def _blocks_of(self, attempt: AttemptId) -> tuple[list[bytes], list[BlockHash]]:
        tokens = list(unpack_token_ids(self.requests[attempt].token_ids))
        return compute_blocks(tokens), extend_block_hashes(ROOT, tokens, SPEC.block_size)

    def _slot(self, data: bytes, block_hash: BlockHash | None) -> LeasedBlock:
        self._next_slot += 1
        handle = SlotHandle(0, self._next_slot, POOL.incarnation, 1)
        self.slots[handle] = (data, block_hash)
        return LeasedBlock(handle, hash(data))

    def _reserve(self, action: ev.ReserveSlots, life: int) -> None:
        assert action.attempt in self.transfers, "reserved for a closed transfer"
        if life != self._pool_life:
            self.handle(ev.ReserveFailed(action.attempt, "lost"))
            return
        outcomes: list[ReserveOutcome] = []
        if self.random.random() < self.exhaustion_rate:
            outcomes = [SlotsExhausted() for _ in action.indices]
        else:
            for block_hash in (*action.block_hashes, *[None] * action.num_private):
                if block_hash is not None and block_hash in self.pool:
                    leased = self._slot(self.pool[block_hash], block_hash)
                    outcomes.append(AlreadyCommitted(leased))
                else:
                    outcomes.append(SlotReserved(self._slot(b"", block_hash).handle))
        self.handle(ev.SlotsReserved(action.attempt, action.indices, tuple(outcomes)))

    def _fetch(self, action: ev.FetchPrefix, life: int) -> None:
        assert action.attempt in self.transfers, "fetched for a closed transfer"
        blocks, hashes = self._blocks_of(action.attempt)
        fetched: list[LeasedBlock] = []
        limit = len(action.block_hashes) if life == self._pool_life else 0
        if action.source is not None:
            limit = self.random.randint(0, limit)
        for number in range(action.first, action.first + limit):
            if action.source is None and hashes[number] not in self.pool:
                break
            fetched.append(self._slot(blocks[number], hashes[number]))
            self.pool[hashes[number]] = blocks[number]
        self.handle(
            ev.PrefixFetched(action.attempt, action.first, len(action.block_hashes), tuple(fetched))
        )

    def _prefill_writes(self, attempt: AttemptId, index: int, handle: SlotHandle) -> None:
        blocks, hashes = self._blocks_of(attempt)

        def write() -> None:
            if self.random.random() < self.loss_rate:
                self.handle(ev.LossReceived(attempt, (handle,)))
                return
            block_hash = hashes[index] if index < len(hashes) else None
            self.slots[handle] = (blocks[index], block_hash)
            if block_hash is not None:
                self.pool[block_hash] = blocks[index]
            block = LeasedBlock(handle, hash(blocks[index]))
            self.handle(ev.CommitsReceived(attempt, (block,)))

        self.later(write)

    def _tell_first_token(self, attempt: AttemptId) -> None:
        request = self.requests[attempt]
        prompt, sampling = self.prompts[attempt.request]
        token_id = toy_generate(prompt, sampling, SPEC)[request.num_output_tokens]
        finished = request.num_output_tokens + 1 >= len(toy_generate(prompt, sampling, SPEC))
        message = PrefillFinished(attempt, token_id, finished)

        def tell() -> None:
            if attempt not in self._told:
                self._told.add(attempt)
                self._log(attempt, request.num_output_tokens, token_id, finished)
            self.handle(ev.FirstTokenReceived(PREFILL.incarnation, message))

        self.later(tell)

    def _load(self, action: ev.LoadBlocks) -> None:
        for number, block in enumerate(action.blocks):
            if self.random.random() < self.corruption_rate:
                self.handle(ev.BlockCorrupt(action.attempt, number, block.leased.handle))
                return
            data = self.slots[block.leased.handle][0]
            assert hash(data) == block.leased.checksum
            self.engine.write_block(block.block_id, memoryview(data))
        self.handle(ev.BlocksLoaded(action.attempt))

    def _run_step(self, action: ev.RunStep) -> None:
        self.num_steps += 1
        last = self.random.randrange(SPEC.num_layers)

        def layer_done(layer: int) -> None:
            if self.abandoned and layer == last:
                raise StepAbandoned

        # The order may also come after the last layer.
        heard = self.random.random() < 0.8
        try:
            results = self.engine.step(action.sequences, layer_done if heard else None)
        except StepAbandoned:
            self.handle(ev.StepAbandoned())
        else:
            self.handle(ev.StepComputed(tuple(results)))

    def _publish(self, action: ev.PublishBlocks, life: int) -> None:
        if life != self._pool_life:
            self.handle(ev.PublishEnded(action.publish_id, 0))
            return
        for block in action.blocks:
            self.pool.setdefault(block.block_hash, bytes(self.engine.read_block(block.block_id)))
        self.handle(ev.PublishEnded(action.publish_id, len(action.blocks)))

    # --- the gateway ---

    def _stream(self, token: TokenEmitted) -> None:
        self.tokens.append(token)
        self._log(token.attempt, token.seq, token.token_id, token.finish is not None)

    def _log(self, attempt: AttemptId, seq: int, token_id: int, finished: bool) -> None:
        if attempt.attempt < self._newest[attempt.request]:
            return
        outputs = self.outputs[attempt.request]
        assert seq == len(outputs), f"{attempt} gives output {seq} after {len(outputs)}"
        outputs.append(token_id)
        if finished:
            self.finished.add(attempt.request)

    def _take_failure(self, action: ev.SendFailure) -> None:
        self.failures.append(action)
        request = action.attempt.request
        if action.code is FailureCode.PREEMPTED and not self.coupled:
            # So the next prefill finds all that was computed.
            tokens = self.prompts[request][0] + self.outputs[request][:-1]
            hashes = extend_block_hashes(ROOT, tokens, SPEC.block_size)
            assert all(block_hash in self.pool for block_hash in hashes)
        if self.retry and action.code is not FailureCode.NEVER_FITS:
            self._place(request, action.attempt.attempt + 1)

    # --- what must hold at the end ---

    def check_all_over(self) -> None:
        counters = self.state.counters()
        for name in ("requests_running", "requests_waiting", "requests_ending"):
            assert counters[name] == 0, name
        assert counters["kv_blocks_in_use"] == 0
        assert self.transfers == set()

    def check_outputs(self) -> None:
        for request, (prompt, sampling) in self.prompts.items():
            assert self.outputs[request] == toy_generate(prompt, sampling, SPEC), request
            assert request in self.finished
