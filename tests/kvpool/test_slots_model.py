"""The slot table against a naive model that keeps one record per use of a slot and no index."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.ids import Incarnation, SlotHandle
from core.messages.to_pool import AlreadyCommitted, BlockWritten, SlotReserved, SlotsExhausted
from kvpool.checksum import pack_checksums
from kvpool.memory import make_layout
from kvpool.policy import LruPolicy
from kvpool.records import LinkId, SlotState, TransferKey
from kvpool.slots import SlotTable
from tests.kvpool.harness import attempt, block_hash

NUM_SLOTS, LAYERS, RESERVE_TTL_S = 6, 2, 3.0
CHECKSUMS = pack_checksums([1, 2])


@dataclass(eq=False)
class Use:
    """One use of a slot, from its reservation to its end."""

    handle: SlotHandle
    number: int | None
    owner: TransferKey | None
    state: SlotState = SlotState.RESERVED
    writer: int | None = None
    verifying: bool = False
    readers: list[int] = field(default_factory=list)
    rank: tuple[int, int] = (0, 0)


@dataclass
class Claim:
    """A transfer; `uses` in the order they came."""

    ttl_s: float
    until_s: float
    reserve_until_s: float
    uses: list[Use] = field(default_factory=list)


links = st.integers(1, 2)
attempts = st.integers(1, 2)
numbers = st.lists(st.integers(0, 5), max_size=3, unique=True)
ttls = st.sampled_from([1.0, 2.0, 5.0])
picks = st.integers(0, 10**6)


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        layout = make_layout(NUM_SLOTS, LAYERS * 8, LAYERS, 4 * LAYERS * 8)
        self.table = SlotTable(
            layout, Incarnation("a" * 16), LruPolicy(), reserve_ttl_s=RESERVE_TTL_S
        )
        self.uses: list[Use] = []
        self.ever: list[SlotHandle] = []
        self.claims: dict[TransferKey, Claim] = {}
        self.reads: list[int] = []
        self.held_by_read: dict[int, list[Use]] = {}
        self.verifications: list[BlockWritten] = []
        self.known: set[bytes] = set()
        self.now_s = 0.0
        self.counter = 0

    # --- the model ---

    def public(self, number: int) -> Use | None:
        for use in self.uses:
            if (use.number, use.state, use.owner) == (number, SlotState.COMMITTED, None):
                return use
        return None

    def holders(self, use: Use) -> int:
        return len(use.readers) + sum(use in c.uses for c in self.claims.values())

    def evictable(self) -> list[Use]:
        return [
            u
            for u in self.uses
            if u.state is SlotState.COMMITTED and u.owner is None and not self.holders(u)
        ]

    def renew(self, key: TransferKey, ttl_s: float) -> Claim:
        now_s, reserve_s = self.now_s, min(ttl_s, RESERVE_TTL_S)
        claim = self.claims.setdefault(key, Claim(ttl_s, now_s + ttl_s, now_s + reserve_s))
        claim.ttl_s = ttl_s
        claim.until_s = max(claim.until_s, now_s + ttl_s)
        claim.reserve_until_s = max(claim.reserve_until_s, now_s + reserve_s)
        return claim

    def unheld(self, uses: list[Use]) -> None:
        """These lost a holder, in this order."""
        self.counter += 1
        for position, use in enumerate(uses):
            if not self.holders(use):
                use.rank = (self.counter, -position)
                if use.state is SlotState.EVICTING:
                    self.uses.remove(use)

    def let_go(self, key: TransferKey, uses: list[Use]) -> None:
        self.claims[key].uses = [u for u in self.claims[key].uses if u not in uses]
        for use in uses:
            if use.owner is not None:
                use.owner = None
                if use.writer is not None or use.verifying:
                    use.state = SlotState.QUARANTINED
                else:
                    self.uses.remove(use)
        self.unheld([u for u in uses if u in self.uses and u.state is not SlotState.QUARANTINED])
        self.sweep()

    def sweep(self) -> None:
        self.claims = {k: c for k, c in self.claims.items() if c.uses}

    def lost(self, uses: list[Use]) -> None:
        """Reserved slots that their owners lose, with a notice."""
        expected: dict[TransferKey, list[SlotHandle]] = {}
        for use in uses:
            assert use.owner is not None
            key = use.owner
            expected.setdefault(key, []).append(use.handle)
            self.let_go(key, [use])
        losses = self.table.take_losses()
        assert {k: set(v) for k, v in losses.items()} == {k: set(v) for k, v in expected.items()}

    def stop_writing(self, use: Use) -> None:
        use.writer = None
        if use.state is SlotState.QUARANTINED and not use.verifying:
            self.uses.remove(use)

    def at(self, handle: SlotHandle) -> Use | None:
        return next((u for u in self.uses if u.handle == handle), None)

    def some(self, pick: int) -> SlotHandle:
        """A handle: mostly one in use, else a stale one."""
        handles = [u.handle for u in self.uses] * 2 + self.ever[-4:]
        return handles[pick % len(handles)]

    # --- rules ---

    @rule(link=links, number=attempts, blocks=numbers, num_private=st.integers(0, 2), ttl_s=ttls)
    def reserve(self, link, number, blocks, num_private, ttl_s):
        key = TransferKey(LinkId(link), attempt(number))
        outcomes = self.table.reserve(
            key, [block_hash(b) for b in blocks], num_private, ttl_s, self.now_s
        )
        claim = self.renew(key, ttl_s)
        for use in (self.public(b) for b in blocks):
            if use is not None and use not in claim.uses:
                claim.uses.append(use)
        mine = {u.number: u for u in claim.uses if u.state is SlotState.RESERVED}
        new = [b for b in blocks if self.public(b) is None and b not in mine]
        num_new = len(new) + num_private
        num_free = NUM_SLOTS - len(self.uses)
        victims = sorted(self.evictable(), key=lambda u: u.rank)
        fits = num_new <= num_free + len(victims)
        if fits:
            for victim in victims[: max(0, num_new - num_free)]:
                self.uses.remove(victim)
        for block, outcome in zip([*blocks, *[None] * num_private], outcomes, strict=True):
            there = None if block is None else self.public(block)
            if there is not None:
                assert isinstance(outcome, AlreadyCommitted)
                assert outcome.block.handle == there.handle
            elif block is not None and block in mine:
                assert outcome == SlotReserved(mine[block].handle)
            elif not fits:
                assert isinstance(outcome, SlotsExhausted)
            else:
                assert isinstance(outcome, SlotReserved)
                assert outcome.handle not in self.ever
                self.ever.append(outcome.handle)
                self.uses.append(Use(outcome.handle, block, key))
                claim.uses.append(self.uses[-1])
        self.sweep()

    @rule(link=links, number=attempts, blocks=numbers, ttl_s=ttls)
    def lease(self, link, number, blocks, ttl_s):
        key = TransferKey(LinkId(link), attempt(number))
        leased = self.table.lease(key, [block_hash(b) for b in blocks], ttl_s, self.now_s)
        claim = self.renew(key, ttl_s)
        expected = []
        for block in blocks:
            use = self.public(block)
            if use is None:
                break
            expected.append(use.handle)
            if use not in claim.uses:
                claim.uses.append(use)
        assert [b.handle for b in leased.blocks()] == expected
        self.sweep()

    @precondition(lambda self: self.ever)
    @rule(link=links, number=attempts, pick=picks)
    def release(self, link, number, pick):
        key = TransferKey(LinkId(link), attempt(number))
        handle = self.some(pick)
        self.table.release(key, [handle, handle])
        use = self.at(handle)
        has = use is not None and key in self.claims and use in self.claims[key].uses
        if use is not None and has and use.state is not SlotState.RESERVED:
            self.let_go(key, [use])

    @rule(link=links, number=attempts)
    def close(self, link, number):
        key = TransferKey(LinkId(link), attempt(number))
        self.table.close(key)
        if key in self.claims:
            self.let_go(key, list(self.claims[key].uses))

    @precondition(lambda self: self.ever)
    @rule(link=links, pick=picks, whole_transfer=st.booleans())
    def begin(self, link, pick, whole_transfer):
        handle = self.some(pick)
        use = self.at(handle)
        claim = self.claims.get(use.owner) if use is not None and use.owner else None
        for each in [u.handle for u in claim.uses] if whole_transfer and claim else [handle]:
            self.begin_one(link, each)

    def begin_one(self, link: int, handle: SlotHandle) -> None:
        use = self.at(handle)
        may = (
            use is not None
            and use.state is SlotState.RESERVED
            and not use.verifying
            and use.writer in (None, link)
        )
        assert self.table.begin(LinkId(link), [handle]) == (may,)
        if use is not None and may:
            use.writer = link

    @precondition(lambda self: any(u.writer for u in self.uses))
    @rule(pick=picks, gives_up=st.booleans(), well_formed=st.sampled_from([True, True, False]))
    def finish_writing(self, pick, gives_up, well_formed):
        written = [u for u in self.uses if u.writer is not None]
        use = written[pick % len(written)]
        link = LinkId(use.writer or 0)
        if gives_up:
            self.table.end(link, [use.handle])
            self.stop_writing(use)
            return
        block = BlockWritten(use.handle, CHECKSUMS if well_formed else CHECKSUMS[:-1])
        accepted = well_formed and use.state is SlotState.RESERVED
        assert self.table.begin_verify(link, [block]) == (accepted,)
        if accepted:
            use.verifying = True
            self.verifications.append(block)
        self.stop_writing(use)

    @rule(link=links, number=attempts, blocks=numbers, ttl_s=ttls, closes=st.booleans())
    def publish(self, link, number, blocks, ttl_s, closes):
        """The usual way through, so that the others find something to act upon."""
        self.reserve(link, number, blocks, 0, ttl_s)
        claim = self.claims.get(TransferKey(LinkId(link), attempt(number)))
        for use in [] if claim is None else list(claim.uses):
            if self.table.begin(LinkId(link), [use.handle]) == (True,):
                block = BlockWritten(use.handle, CHECKSUMS)
                assert self.table.begin_verify(LinkId(link), [block]) == (True,)
                use.writer, use.verifying = None, True
                self.verifications.append(block)
                self.verified(len(self.verifications) - 1, True)
        if closes:
            self.close(link, number)

    @precondition(lambda self: self.verifications)
    @rule(pick=picks, good=st.sampled_from([True, True, False]))
    def verified(self, pick, good):
        block = self.verifications.pop(pick % len(self.verifications))
        use = self.at(block.handle)
        assert use is not None
        use.verifying = False
        done = self.table.finish_verify(block, good, self.now_s)
        assert done == (good and use.state is SlotState.RESERVED)
        commits = self.table.take_commits()
        if not done:
            if use.state is SlotState.QUARANTINED:
                self.uses.remove(use)
            else:
                self.lost([use])
            assert not commits
            return
        key = use.owner
        assert key is not None
        assert {k: [b.handle for b in v] for k, v in commits.items()} == {key: [use.handle]}
        if use.number is not None and self.public(use.number) is None:
            use.owner = None
        use.state = SlotState.COMMITTED
        claim = self.claims[key]
        claim.until_s = max(claim.until_s, self.now_s + claim.ttl_s)

    @rule(link=links)
    def drop_link(self, link):
        self.table.drop_link(LinkId(link))
        for key in [k for k in self.claims if k.link == link]:
            self.let_go(key, list(self.claims[key].uses))
        written = [u for u in self.uses if u.writer == link]
        reserved = [u for u in written if u.state is SlotState.RESERVED]
        for use in written:
            self.stop_writing(use)
        self.lost(reserved)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.table.expire(self.now_s)
        for key, claim in list(self.claims.items()):
            if self.now_s >= claim.until_s:
                held = [u for u in claim.uses if u.state is not SlotState.RESERVED]
                self.let_go(key, held)
        self.lost(
            [
                u
                for c in list(self.claims.values())
                if self.now_s >= c.reserve_until_s
                for u in c.uses
                if u.state is SlotState.RESERVED and u.writer is None and not u.verifying
            ]
        )

    @rule(blocks=numbers)
    def read(self, blocks):
        self.counter += 1
        read = self.counter
        indexes = self.table.read(read, [block_hash(b) for b in blocks])
        held = []
        for block in blocks:
            use = self.public(block)
            if use is None:
                break
            use.readers.append(read)
            held.append(use)
        assert [self.table.handle(i) for i in indexes] == [u.handle for u in held]
        self.reads.append(read)
        self.held_by_read[read] = held

    @precondition(lambda self: self.reads)
    @rule(pick=picks)
    def end_read(self, pick):
        read = self.reads.pop(pick % len(self.reads))
        self.table.end_read(read)
        for use in self.held_by_read[read]:
            use.readers.remove(read)
        self.unheld(self.held_by_read.pop(read))

    @precondition(lambda self: self.ever)
    @rule(pick=picks)
    def corrupt(self, pick):
        handle = self.some(pick)
        use = self.at(handle)
        hits = use is not None and use.state is SlotState.COMMITTED and use.owner is None
        assert self.table.drop_corrupt(handle) == hits
        if use is not None and hits:
            use.state = SlotState.EVICTING
            if not self.holders(use):
                self.uses.remove(use)

    @rule()
    def flush(self):
        added, removed = self.table.take_changes()
        assert not self.known & set(added)
        assert set(removed) <= self.known
        self.known = (self.known | set(added)) - set(removed)
        assert self.known == set(self.table.public_hashes())

    # --- what must hold ---

    @invariant()
    def agrees(self):
        self.table.validate()
        counts = dict.fromkeys(SlotState, 0)
        for use in self.uses:
            counts[use.state] += 1
        counts[SlotState.FREE] = NUM_SLOTS - len(self.uses)
        assert self.table.count() == counts
        assert self.table.num_transfers == len(self.claims)
        assert self.table.num_leases == sum(
            u.state is not SlotState.RESERVED for c in self.claims.values() for u in c.uses
        )
        expected = {block_hash(n) for n in range(8) if self.public(n) is not None}
        assert set(self.table.public_hashes()) == expected


SlotMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestSlots = pytest.mark.slow(SlotMachine.TestCase)
