"""The directory: examples, and a state machine against naive sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.hashing import join_hashes
from core.ids import Address, Incarnation, PoolRef
from core.messages.to_conductor import PoolEvents, PoolSnapshot
from core.messages.to_pool import Tier
from kvpool.directory import AskSnapshot, Directory
from tests.kvpool.harness import block_hash, hashes

DRAM, SSD = Tier.DRAM, Tier.SSD


def node(number: int, life: int = 1) -> PoolRef:
    return PoolRef(f"N{number}", Incarnation(f"{number}-{life}"), Address("host", number))


def joined(*numbers: int) -> bytes:
    return join_hashes(hashes(*numbers))


def snapshot(seq: int, *numbers: int, last: bool = True, tier: Tier = DRAM) -> PoolSnapshot:
    return PoolSnapshot(seq, tier, joined(*numbers), last)


def batch(seq: int, added=(), removed=(), tier: Tier = DRAM) -> PoolEvents:
    return PoolEvents(seq, tier, joined(*added), joined(*removed))


def test_matches_stop_at_the_first_gap():
    directory = Directory()
    for ref, held in ((node(1), (1, 2, 4)), (node(2), (1, 2, 3)), (node(3), (2, 3, 4))):
        directory.add(ref)
        directory.apply(ref.incarnation, snapshot(0, *held))
    asked = joined(1, 2, 3, 4)
    assert directory.match(asked) == {"1-1": 2, "2-1": 3}
    assert directory.longest(asked) == (node(2), 3)
    assert directory.longest(joined(1, 2)) == (node(1), 2)  # of equals, the lowest name
    assert directory.longest(joined(9)) is None
    assert directory.match(b"") == {}
    assert directory.num_blocks == 4
    assert directory.num_replicas(block_hash(2)) == 3


def test_a_prefix_may_be_spread_over_tiers():
    directory = Directory()
    directory.add(node(1))
    directory.apply(node(1).incarnation, snapshot(3, 1, 3))
    directory.apply(node(1).incarnation, snapshot(3, 2, tier=SSD))
    assert directory.match(joined(1, 2, 3)) == {"1-1": 3}
    assert directory.match(joined(1, 2, 3), [DRAM]) == {"1-1": 1}
    assert directory.match(joined(1, 2, 3), [SSD]) == {}
    assert directory.apply(node(1).incarnation, batch(4, removed=[2], tier=SSD)) == []
    assert directory.match(joined(1, 2, 3)) == {"1-1": 1}


def test_a_gap_asks_once_and_the_snapshot_repairs_it():
    directory = Directory()
    life = node(1).incarnation
    directory.add(node(1))
    assert directory.apply(life, batch(1, [7])) == []  # the snapshot is on its way
    assert directory.num_blocks == 0
    directory.apply(life, snapshot(1, 1))
    assert directory.apply(life, batch(2, [2])) == []
    assert directory.apply(life, batch(2, [3])) == []  # repeated: nothing changes
    assert directory.apply(life, batch(4, [4], [1])) == [AskSnapshot(life)]
    assert directory.apply(life, batch(5, [5])) == []
    assert directory.num_gaps == 1
    assert directory.match(joined(1, 2, 3)) == {life: 2}  # as known before the gap
    directory.apply(life, snapshot(5, 2, last=False))
    assert directory.match(joined(1, 2)) == {life: 2}  # swapped in at once, at its end
    directory.apply(life, snapshot(5, 5))
    assert directory.match(joined(1)) == {}
    assert directory.num_blocks == 2
    assert directory.apply(life, batch(6, [6])) == []
    assert directory.num_blocks == 3


def test_another_life_starts_with_nothing():
    directory = Directory()
    directory.add(node(1))
    directory.apply(node(1).incarnation, snapshot(9, 1))
    directory.drop(node(1).incarnation)
    directory.drop(node(1).incarnation)
    directory.add(node(1, life=2))
    assert directory.apply(node(1).incarnation, batch(10, [2])) == []
    directory.apply(node(1).incarnation, snapshot(9, 1))
    assert (directory.num_blocks, directory.match(joined(1))) == (0, {})
    assert directory.ref(node(1).incarnation) is None
    assert directory.ref(node(1, life=2).incarnation) == node(1, life=2)


links = st.integers(0, 2)
sets = st.sets(st.integers(0, 9), max_size=5)


class DirectoryMachine(RuleBasedStateMachine):
    """Nodes change, publish over links that lose batches, and restart."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.lives = [1, 1, 1]
        self.seqs = [0, 0, 0]
        self.truth: list[set[int]] = [set(), set(), set()]
        self.seen: list[set[int]] = [set(), set(), set()]  # what the directory may know
        self.asked = [False] * 3
        self.broken = [False] * 3
        self.gaps = 0
        for i in range(3):
            self.register(i)

    def life(self, i: int) -> Incarnation:
        return node(i, self.lives[i]).incarnation

    def register(self, i: int) -> None:
        self.directory.add(node(i, self.lives[i]))
        self.send_snapshot(i, 1)

    def send_snapshot(self, i: int, num_parts: int) -> None:
        numbers = sorted(self.truth[i])
        for part in range(num_parts):
            message = snapshot(self.seqs[i], *numbers[part::num_parts], last=part == num_parts - 1)
            assert self.directory.apply(self.life(i), message) == []
        self.seen[i] = set(self.truth[i])
        self.asked[i] = self.broken[i] = False

    @rule(i=links, wanted=sets, arrives=st.sampled_from([True, True, True, False]))
    def change(self, i, wanted, arrives):
        added, removed = wanted - self.truth[i], self.truth[i] - wanted
        self.truth[i] = wanted
        self.seqs[i] += 1
        if not arrives:
            self.broken[i] = True
            return
        actions = self.directory.apply(self.life(i), batch(self.seqs[i], added, removed))
        if self.broken[i] and not self.asked[i]:
            assert actions == [AskSnapshot(self.life(i))]
            self.asked[i] = True
            self.gaps += 1
        else:
            assert actions == []
        if not self.broken[i]:
            self.seen[i] = set(wanted)

    @rule(i=links, num_parts=st.integers(1, 3))
    @precondition(lambda self: any(self.asked))
    def repair(self, i, num_parts):
        if self.asked[i]:
            self.send_snapshot(i, num_parts)

    @rule(i=links)
    def restart(self, i):
        late = batch(self.seqs[i] + 1, {11})
        old = self.life(i)
        self.directory.drop(old)
        self.lives[i] += 1
        self.seqs[i], self.truth[i] = 0, set()
        self.register(i)
        assert self.directory.apply(old, late) == []

    @rule(asked=st.lists(st.integers(0, 9), max_size=6))
    def match(self, asked):
        expected = {}
        for i in range(3):
            length = 0
            while length < len(asked) and asked[length] in self.seen[i]:
                length += 1
            if length:
                expected[self.life(i)] = length
        found = joined(*asked)
        assert self.directory.match(found) == expected
        best = self.directory.longest(found)
        assert (best[1] if best else 0) == max(expected.values(), default=0)

    @invariant()
    def agrees(self):
        self.directory.validate()
        assert self.directory.num_blocks == len(set().union(*self.seen))
        assert self.directory.num_gaps == self.gaps


DirectoryMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)
TestDirectory = pytest.mark.slow(DirectoryMachine.TestCase)
