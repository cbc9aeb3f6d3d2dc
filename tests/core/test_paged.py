"""The paged allocator against a naive model, and its contract in small examples."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import InvariantError
from core.ids import BlockHash
from core.paged import PagedAllocator


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


NUM_BLOCKS = 6


class PagedMachine(RuleBasedStateMachine):
    """The model knows holders, what each block contains, and in which order blocks went idle."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagedAllocator(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.contents: dict[int, BlockHash] = {}
        self.idle: list[int] = list(range(NUM_BLOCKS))  # least recently released first

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        empty = [b for b in self.idle if b not in self.contents]
        cached = [b for b in self.idle if b in self.contents]
        taken = self.pool.allocate(count)
        if count > len(self.idle):
            assert taken is None
            return
        assert taken is not None
        assert len(set(taken)) == count
        num_evicted = max(0, count - len(empty))
        evicted = [b for b in taken if b in self.contents]
        assert evicted == cached[:num_evicted], "evicts only when it must, oldest first"
        for block in taken:
            self.contents.pop(block, None)
            self.idle.remove(block)
        if taken:
            self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), content=st.integers(0, 9))
    def publish(self, data, content):
        block = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.publish(block, name(content))
        if block not in self.contents and name(content) not in self.contents.values():
            self.contents[block] = name(content)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = self.held()
        self.idle += [block for block in reversed(table) if block not in held]

    @rule(contents=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def match_and_acquire(self, contents):
        where = {content: block for block, content in self.contents.items()}
        expected = []
        for content in contents:
            if name(content) not in where:
                break
            expected.append(where[name(content)])
        found = self.pool.match([name(content) for content in contents])
        assert found == expected, "the longest known prefix, and nothing after a gap"
        self.pool.acquire(found)
        self.idle = [block for block in self.idle if block not in found]
        if found:
            self.tables.append(found)

    @rule(content=st.integers(0, 9))
    def drop_cached(self, content):
        self.pool.drop_cached(name(content))
        self.contents = {b: c for b, c in self.contents.items() if c != name(content)}

    @invariant()
    def agrees(self):
        self.pool.validate(self.tables)
        assert self.pool.num_available == len(self.idle)
        assert self.pool.num_in_use == len(self.held())
        for content in range(10):
            block = [b for b, c in self.contents.items() if c == name(content)]
            assert self.pool.match([name(content)]) == block


TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_prefix_loses_its_end_first():
    pool = PagedAllocator(3)
    table = pool.allocate(3)
    assert table is not None
    for number, block in enumerate(table):
        pool.publish(block, name(number))
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.match([name(0), name(1), name(2)]) == table[:2]


def test_what_is_shared_stays_until_the_last_holder_leaves():
    pool = PagedAllocator(1)
    (block,) = pool.allocate(1) or []
    pool.publish(block, name(0))
    pool.acquire([block])
    pool.release([block])
    assert pool.allocate(1) is None
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.match([name(0)]) == []


def test_misuse_is_refused():
    pool = PagedAllocator(2)
    table = pool.allocate(1)
    assert table is not None
    pool.release(table)
    with pytest.raises(InvariantError, match="more often than taken"):
        pool.release(table)
    with pytest.raises(InvariantError, match="not held"):
        pool.publish(table[0], name(0))
    with pytest.raises(InvariantError, match="is free"):
        pool.acquire(table)


def test_validate_notices_a_table_that_nobody_told_of():
    pool = PagedAllocator(2)
    with pytest.raises(InvariantError, match="reference counts"):
        pool.validate([[0]])
