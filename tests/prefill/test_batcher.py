"""The batcher alone: what every chunk must be, and who may wait for whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching import ChunkBatcher, Piece
from core.errors import ConfigError, InvariantError
from core.ids import AttemptId, Incarnation, RequestId
from prefill.batcher import PrefillBatcher

BLOCK = 4


def attempt(number: int) -> AttemptId:
    return AttemptId(RequestId(Incarnation("g"), number), 1)


def batcher(max_chunk_tokens: int = 16, max_chunk_requests: int = 4) -> PrefillBatcher:
    return PrefillBatcher(
        max_chunk_tokens=max_chunk_tokens,
        max_chunk_requests=max_chunk_requests,
        block_size=BLOCK,
    )


def filled(*lengths: int, priorities: tuple[int, ...] = ()) -> PrefillBatcher:
    made = batcher()
    for number, length in enumerate(lengths):
        priority = priorities[number] if priorities else 0
        made.add(attempt(number), start=0, end=length, priority=priority)
    return made


def shape(chunk: tuple[Piece, ...]) -> dict[int, int]:
    return {piece.attempt.request.counter: piece.num_tokens for piece in chunk}


ranges = st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(0, 2))


@settings(deadline=None)
@given(
    queue=st.lists(ranges, max_size=12),
    max_chunk_tokens=st.integers(BLOCK, 40),
    max_chunk_requests=st.integers(1, 5),
)
def test_every_token_is_handed_out_once_in_order_within_the_bounds(
    queue, max_chunk_tokens, max_chunk_requests
):
    made: ChunkBatcher = batcher(max_chunk_tokens, max_chunk_requests)
    left: dict[AttemptId, tuple[int, int]] = {}
    for number, (start_block, length, priority) in enumerate(queue):
        start = start_block * BLOCK
        left[attempt(number)] = (start, start + length)
        made.add(attempt(number), start=start, end=start + length, priority=priority)
    while left:
        assert made.queued_tokens == sum(end - start for start, end in left.values())
        chunk = made.next_chunk(1000)
        assert 1 <= len(chunk) <= max_chunk_requests
        assert len({piece.attempt for piece in chunk}) == len(chunk)
        assert sum(piece.num_tokens for piece in chunk) <= max_chunk_tokens
        for piece in chunk:
            start, end = left.pop(piece.attempt)
            assert piece.start == start and piece.num_tokens > 0
            assert piece.last == (piece.end == end)
            if not piece.last:
                assert piece.end % BLOCK == 0
                left[piece.attempt] = (piece.end, end)
    assert made.queued_tokens == 0 and made.next_chunk(1000) == ()


@settings(deadline=None)
@given(
    length=st.integers(1, 400),
    shorts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    max_chunk_tokens=st.integers(BLOCK, 40),
)
def test_short_prompts_cannot_keep_a_long_one_from_half_of_the_budget(
    length, shorts, max_chunk_tokens
):
    made = batcher(max_chunk_tokens)
    made.add(attempt(0), start=0, end=length, priority=0)
    number = 0
    while length:
        for short in shorts:  # new ones come all the time
            number += 1
            made.add(attempt(number), start=0, end=short, priority=0)
        done = shape(made.next_chunk(max_chunk_tokens)).get(0, 0)
        assert done == length or done >= max(BLOCK, max_chunk_tokens // 2 - BLOCK + 1)
        length -= done


@settings(deadline=None)
@given(long=st.integers(200, 400), short=st.integers(1, 8))
def test_a_short_prompt_behind_long_ones_is_in_the_next_chunk(long, short):
    made = filled(long, long, long, short)
    assert shape(made.next_chunk(16))[3] == short


def test_short_prompts_share_a_chunk():
    assert shape(filled(3, 4, 5).next_chunk(16)) == {0: 3, 1: 4, 2: 5}


def test_equal_prompts_go_one_after_the_other():
    made = filled(32, 32)
    chunks = [shape(made.next_chunk(16)) for _ in range(4)]
    assert chunks == [{0: 16}, {0: 16}, {1: 16}, {1: 16}]


def test_priority_goes_before_arrival_and_before_length():
    made = filled(2, 40, 40, priorities=(1, 0, 0))
    assert shape(made.next_chunk(16)) == {1: 16}


def test_a_smaller_budget_is_kept_and_less_than_a_block_gives_no_piece():
    made = filled(40, 40)
    assert shape(made.next_chunk(9)) == {0: 8}
    assert made.next_chunk(BLOCK - 1) == ()
    assert made.queued_tokens == 72


def test_removed_attempts_are_not_computed():
    made = filled(40, 8)
    made.remove(attempt(0))
    made.remove(attempt(0))
    assert shape(made.next_chunk(16)) == {1: 8}


def test_the_same_queue_gives_the_same_chunks():
    first, second = filled(40, 3, 9, 17), filled(40, 3, 9, 17)
    assert [first.next_chunk(16) for _ in range(6)] == [second.next_chunk(16) for _ in range(6)]


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="block size"):
        batcher(max_chunk_tokens=BLOCK - 1)
    made = filled(5)
    with pytest.raises(InvariantError):
        made.add(attempt(0), start=0, end=5, priority=0)
    with pytest.raises(InvariantError):
        made.add(attempt(1), start=5, end=5, priority=0)
