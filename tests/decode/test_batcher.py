"""Who gets blocks when they are short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import AttemptId, BlockHash, Incarnation, RequestId
from core.paged import PagedAllocator
from decode.batcher import MAX_BYPASSES, BatchedSequence, DecodeBatcher

BLOCK_SIZE = 4


def make(arrival: int, num_positions: int, max_blocks: int, preempted: int = 0) -> BatchedSequence:
    attempt = AttemptId(RequestId(Incarnation("g"), arrival), 1)
    return BatchedSequence(attempt, arrival, preempted, num_positions, max_blocks)


def new_batcher(num_blocks: int, max_batch: int = 8) -> DecodeBatcher:
    allocator = PagedAllocator(num_blocks)
    return DecodeBatcher(allocator, max_batch=max_batch, block_size=BLOCK_SIZE)


def admit(batcher: DecodeBatcher, *ready: BatchedSequence) -> list[int]:
    admitted = admit_unchecked(batcher, *ready)
    batcher.validate([])
    return admitted


def admit_unchecked(batcher: DecodeBatcher, *ready: BatchedSequence) -> list[int]:
    return [sequence.arrival for sequence, _ in batcher.admit(ready, lambda sequence: [])]


def test_the_batch_is_bounded_and_oldest_first():
    batcher = new_batcher(64, max_batch=2)
    assert admit(batcher, *(make(i, 1, 1) for i in (3, 1, 2))) == [1, 2]
    assert batcher.num_active == 2


def test_the_latest_gives_way_to_the_earliest():
    batcher = new_batcher(4)
    old, middle, young = (make(i, 4, 3) for i in range(3))
    for sequence in (old, middle, young):
        sequence.max_blocks = 1  # nothing is reserved, so that all come in
    assert admit(batcher, old, middle, young) == [0, 1, 2]
    for sequence in (old, middle):
        sequence.num_positions, sequence.max_blocks = 5, 3
    plan = batcher.plan([young, middle, old], blocks_coming=False)
    assert plan.run == (old, middle)
    assert plan.preempted == (young,)
    assert young.table == []
    batcher.validate([])


def test_who_lacks_a_block_sits_out_when_blocks_are_coming():
    batcher = new_batcher(2)
    old, young = make(0, 4, 1), make(1, 4, 1)
    admit(batcher, old, young)
    old.num_positions, old.max_blocks = 5, 2
    plan = batcher.plan([old, young], blocks_coming=True)
    assert (plan.run, plan.preempted) == ((young,), ())


def test_a_short_one_passes_a_long_one_that_waits_but_not_for_ever():
    batcher = new_batcher(10, max_batch=64)
    assert admit(batcher, make(0, 4 * 6, 6)) == [0]
    blocked = make(1, 4 * 8, 8)
    passed = 0
    for arrival in range(2, 100):
        short = make(arrival, 1, 1)
        if admit(batcher, blocked, short) != [arrival]:
            break
        passed += 1
        batcher.remove(short)
    assert passed == MAX_BYPASSES


@pytest.mark.parametrize(("num_preempted", "reserve"), [(0, 2), (1, 8), (2, 32), (3, 98)])
def test_a_request_that_gave_way_needs_a_larger_reserve(num_preempted, reserve):
    # Two active sequences, one block each, that may grow by 49 blocks each.
    for num_blocks, admitted in ((1 + 1 + reserve, [1]), (1 + reserve, [])):
        batcher = new_batcher(100)
        batcher.allocator.allocate(100 - num_blocks)
        first = make(0, 4, 1)
        assert admit_unchecked(batcher, first) == [0]
        first.max_blocks = 50
        assert admit_unchecked(batcher, make(1, 4, 50, num_preempted)) == admitted


def test_blocks_known_by_content_are_shared():
    batcher = new_batcher(4)
    block_hash = BlockHash(b"h" * 32)
    first, second = make(0, 5, 2), make(1, 5, 2)
    admit(batcher, first)
    batcher.allocator.publish(first.table[0], block_hash)
    ((sequence, num_found),) = batcher.admit([second], lambda _: [block_hash])
    assert (sequence, num_found) == (second, 1)
    assert first.table[0] == second.table[0]
    assert batcher.allocator.num_in_use == 3
    batcher.validate([])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 80)), min_size=1, max_size=12),
    spare=st.integers(0, 20),
)
def test_everybody_finishes_with_bounded_preemptions(sizes, spare):
    """Requests come at once, give way, come back with their past, and grow to their bound."""
    bounds = [-(-(prompt + growth) // BLOCK_SIZE) for prompt, growth in sizes]
    batcher = new_batcher(max(bounds) + spare)
    waiting = [make(i, sizes[i][0], bounds[i]) for i in range(len(sizes))]
    running: list[BatchedSequence] = []
    for _ in range(10_000):
        for sequence, _found in batcher.admit(waiting, lambda _: []):
            waiting.remove(sequence)
            running.append(sequence)
        assert running, "nobody runs though somebody waits"
        plan = batcher.plan(running, blocks_coming=False)
        batcher.validate([])
        assert plan.run, "a step without anybody"
        for sequence in plan.preempted:
            running.remove(sequence)
            sequence.num_preempted += 1
            assert sequence.num_preempted <= 4
            assert sequence.arrival > plan.run[0].arrival
            waiting.append(sequence)
        for sequence in plan.run:
            prompt, growth = sizes[sequence.arrival]
            sequence.num_positions += 1
            if sequence.num_positions > prompt + growth:
                batcher.remove(sequence)
                running.remove(sequence)
        if not (running or waiting):
            assert batcher.allocator.num_in_use == 0
            return
    raise AssertionError("never ends")
