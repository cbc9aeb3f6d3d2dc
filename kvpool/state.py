"""The pool node as a pure state machine: `handle(event)` returns what is to be done.

The shell (`kvpool/node.py`) and the simulation run this very class. It owns the slot table, the
fetches under way, and the sequence of event batches for the Conductor's directory. The bytes
themselves are the shell's: it asks `write_targets` where slices go, and turns actions into I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import assert_never

from core.config import PoolNodeConfig
from core.errors import WireError
from core.hashing import join_hashes, split_hashes
from core.ids import AttemptId, BlockHash, PoolRef, RequestId
from core.messages.to_conductor import (
    LinkSample,
    PoolEvents,
    PoolReport,
    PoolSnapshot,
    PoolTotals,
    RegisterPoolNode,
    TransferTotals,
)
from core.messages.to_pool import (
    BeginWrites,
    BlocksCommitted,
    BlocksRead,
    BlocksReserved,
    BlockWritten,
    CloseTransfer,
    CommitBlocks,
    EndWrites,
    FetchBlocks,
    GetPoolStats,
    LeaseBlocks,
    PoolStats,
    ReadBlocks,
    ReleaseBlocks,
    ReportCorrupt,
    ReserveBlocks,
    SendSnapshot,
    Tier,
    TransferCommits,
    TransferLoss,
    WritesBegun,
    WriteSlices,
)
from core.wire import MAX_PAYLOAD_BYTES, Message
from kvpool.events import (
    Action,
    BlocksSent,
    BlocksVerified,
    ConductorRegistered,
    Event,
    LinkClosed,
    Refuse,
    Reply,
    Requested,
    SendBlocks,
    SourceFailed,
    SourceLeased,
    SourceRead,
    Tell,
    TellConductor,
    Ticked,
    Told,
    VerifyBlocks,
)
from kvpool.fetching import Fetch, FetchPlan
from kvpool.memory import make_layout
from kvpool.policy import EvictionPolicy, LruPolicy
from kvpool.records import Generations, LinkId, SlotState, TransferKey
from kvpool.slots import SlotTable

HASHES_PER_MESSAGE = 1 << 16
"""2 MiB of hashes: a quarter of what one message may take."""


class PoolNodeState:
    """See the module's docstring. `table` is for tests and the shell to look at."""

    def __init__(
        self,
        config: PoolNodeConfig,
        ref: PoolRef,
        *,
        generations: Generations | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """Raises `ConfigError` for a configuration that cannot work."""
        layout = make_layout(
            config.num_slots, config.slot_bytes, config.num_layers, config.segment_bytes
        )
        self.ref = ref
        self.counters: Counter[str] = Counter()
        self.table = SlotTable(
            layout,
            ref.incarnation,
            LruPolicy() if policy is None else policy,
            reserve_ttl_s=config.reserve_ttl_s,
            generations=generations,
        )
        self._config = config
        self._seq = 0
        self._last_number = 0
        self._commits: dict[int, tuple[LinkId, int, tuple[BlockWritten, ...], list[bool]]] = {}
        self._fetches: dict[int, Fetch] = {}
        self._fetch_verifications: dict[int, tuple[Fetch, list[BlockWritten]]] = {}

    def handle(self, event: Event) -> list[Action]:
        """Apply one event. Raises `WireError` for a message that no honest peer sends."""
        match event:
            case Requested():
                actions = self._request(event)
            case Told(now_s, link, message):
                actions = self._told(now_s, link, message)
            case LinkClosed(_, link):
                self._cancel_fetches(link)
                self.table.drop_link(link)
                actions = []
            case Ticked(now_s):
                self.table.expire(now_s)
                actions = self._flush()
            case ConductorRegistered():
                actions = self._snapshot()
            case BlocksVerified(now_s, verification, good):
                actions = self._verified(verification, good, now_s)
            case BlocksSent(read):
                self.table.end_read(read)
                actions = []
            case SourceLeased() | SourceRead() | SourceFailed():
                actions = self._fetch_went_on(event)
            case _:
                assert_never(event)
        return [*actions, *self._notices()]

    def write_targets(self, link: LinkId, message: WriteSlices) -> list[int | None]:
        """Return the slot number for each slice, `None` for one to read and drop.

        Raises `WireError` when the message contradicts itself.
        """
        if len(message.checksums) != len(message.handles):
            raise WireError("WriteSlices has a checksum for each slice")
        if not 0 <= message.layer < self.table.layout.num_layers:
            raise WireError(f"there is no layer {message.layer}")
        targets = [self.table.writable(link, handle) for handle in message.handles]
        self.counters["slices_dropped"] += targets.count(None)
        return targets

    # --- messages ---

    def _request(self, event: Requested) -> list[Action]:
        now_s, link, number = event.now_s, event.link, event.correlation
        match event.message:
            case LeaseBlocks(attempt, raw, ttl_s):
                key, hashes = self._transfer(link, attempt, ttl_s), _split(raw)
                if key is None:
                    return [self._full(event)]
                leased = self.table.lease(key, hashes, ttl_s, now_s)
                self.counters["blocks_leased"] += leased.num_blocks
                return [Reply(link, number, leased)]
            case ReserveBlocks(attempt, raw, num_private, ttl_s):
                key, hashes = self._transfer(link, attempt, ttl_s), _split(raw)
                if not 0 <= num_private <= self.table.layout.num_slots:
                    raise WireError(f"{num_private} private blocks are no sensible number")
                if key is None:
                    return [self._full(event)]
                outcomes = self.table.reserve(key, hashes, num_private, ttl_s, now_s)
                return [Reply(link, number, BlocksReserved(outcomes))]
            case BeginWrites(handles):
                return [Reply(link, number, WritesBegun(self.table.begin(link, handles)))]
            case CommitBlocks(blocks):
                return self._commit(link, number, blocks)
            case FetchBlocks():
                return self._fetch(event, event.message)
            case ReadBlocks(raw):
                return self._read(link, number, _split(raw))
            case GetPoolStats():
                return [Reply(link, number, self.stats())]
            case _:
                raise WireError(f"{type(event.message).__name__} is no request to a pool node")

    def _told(self, now_s: float, link: LinkId, message: Message) -> list[Action]:
        match message:
            case ReleaseBlocks(attempt, handles):
                self.table.release(TransferKey(link, attempt), handles)
            case CloseTransfer(attempt):
                self._cancel_fetches(link, attempt)
                self.table.close(TransferKey(link, attempt))
            case EndWrites(handles):
                self.table.end(link, handles)
            case WriteSlices(_, handles, _):
                self.counters["slices_received"] += len(handles)
            case ReportCorrupt(handle):
                self.counters["blocks_corrupt"] += self.table.drop_corrupt(handle)
            case SendSnapshot():
                return self._snapshot()
            case _:
                raise WireError(f"{type(message).__name__} is no message to a pool node")
        return []

    def _transfer(self, link: LinkId, attempt: AttemptId, ttl_s: float) -> TransferKey | None:
        """Name the transfer; `None` when it would be one too many."""
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise WireError(f"{ttl_s} s is no lease time")
        key = TransferKey(link, attempt)
        known = self.table.has_transfer(key)
        return key if known or self.table.num_transfers < self._config.max_transfers else None

    def _full(self, event: Requested) -> Action:
        reason = f"{self._config.max_transfers} transfers are open"
        return Refuse(event.link, event.correlation, reason)

    def _notices(self) -> Iterator[Action]:
        for key, blocks in self.table.take_commits().items():
            yield Tell(key.link, TransferCommits(key.attempt, tuple(blocks)))
        for key, handles in self.table.take_losses().items():
            yield Tell(key.link, TransferLoss(key.attempt, tuple(handles)))

    # --- commits and reads ---

    def _commit(
        self, link: LinkId, correlation: int, blocks: tuple[BlockWritten, ...]
    ) -> list[Action]:
        accepted = list(self.table.begin_verify(link, blocks))
        self.counters["blocks_refused"] += accepted.count(False)
        chosen = tuple(b for b, ok in zip(blocks, accepted, strict=True) if ok)
        if not chosen:
            return [Reply(link, correlation, BlocksCommitted(tuple(accepted)))]
        verification = self._number()
        self._commits[verification] = (link, correlation, chosen, accepted)
        return [VerifyBlocks(verification, chosen)]

    def _verified(self, number: int, good: Sequence[bool], now_s: float) -> list[Action]:
        if number in self._fetch_verifications:
            fetch, written = self._fetch_verifications.pop(number)
            self._count(good)
            return self._went_on(fetch, fetch.verified(written, good, now_s))
        link, correlation, blocks, accepted = self._commits.pop(number)
        self._count(good)
        outcomes = iter(
            [
                self.table.finish_verify(block, ok, now_s)
                for block, ok in zip(blocks, good, strict=True)
            ]
        )
        answer = tuple(next(outcomes) if ok else False for ok in accepted)
        return [Reply(link, correlation, BlocksCommitted(answer))]

    def _count(self, good: Sequence[bool]) -> None:
        self.counters["blocks_verified"] += sum(good)
        self.counters["blocks_mismatched"] += len(good) - sum(good)

    def _read(self, link: LinkId, correlation: int, hashes: list[BlockHash]) -> list[Action]:
        # What does not fit one payload is left out, as if it were not here.
        fitting = hashes[: max(1, MAX_PAYLOAD_BYTES // self.table.layout.slot_bytes)]
        read = self._number()
        slots = self.table.read(read, fitting)
        self.counters["blocks_read"] += len(slots)
        message = BlocksRead(tuple(self.table.slice_checksums(i) for i in slots))
        return [SendBlocks(link, correlation, read, message, slots)]

    # --- fetches ---

    def _fetch(self, event: Requested, ask: FetchBlocks) -> list[Action]:
        if not (math.isfinite(ask.deadline_s) and ask.deadline_s > 0):
            raise WireError(f"{ask.deadline_s} s is no deadline")
        key = self._transfer(event.link, ask.attempt, ask.ttl_s)
        if key is None:
            return [self._full(event)]
        number = self._number()
        plan = FetchPlan(
            fetch=number,
            key=key,
            correlation=event.correlation,
            source=ask.source,
            source_attempt=AttemptId(RequestId(self.ref.incarnation, number), 1),
            block_hashes=tuple(_split(ask.block_hashes)),
            ttl_s=ask.ttl_s,
            deadline_s=ask.deadline_s,
        )
        self._fetches[number] = Fetch(plan, self.table)
        return self._went_on(self._fetches[number], self._fetches[number].start(event.now_s))

    def _fetch_went_on(self, event: SourceLeased | SourceRead | SourceFailed) -> list[Action]:
        fetch = self._fetches[event.fetch]
        match event:
            case SourceLeased(now_s, _, num_blocks):
                return self._went_on(fetch, fetch.leased(num_blocks, now_s))
            case SourceRead(now_s, _, slice_checksums):
                blocks = fetch.read(slice_checksums)
                if not blocks:
                    return self._went_on(fetch, fetch.failed(now_s))
                number = self._number()
                self._fetch_verifications[number] = (fetch, blocks)
                return [VerifyBlocks(number, tuple(blocks))]
            case SourceFailed(now_s):
                self.counters["fetches_failed"] += 1
                return self._went_on(fetch, fetch.failed(now_s))

    def _went_on(self, fetch: Fetch, actions: list[Action]) -> list[Action]:
        if fetch.over:
            self.counters["blocks_fetched"] += fetch.num_fetched
            del self._fetches[fetch.plan.fetch]
        return actions

    def _cancel_fetches(self, link: LinkId, attempt: AttemptId | None = None) -> None:
        for fetch in self._fetches.values():
            key = fetch.plan.key
            if key.link == link and attempt in (None, key.attempt):
                fetch.cancelled = True

    # --- the Conductor ---

    def registration(self) -> RegisterPoolNode:
        """Return the message a node introduces itself with."""
        layout = self.table.layout
        return RegisterPoolNode(self.ref, layout.num_slots, layout.slot_bytes)

    def _flush(self) -> list[Action]:
        added, removed = self.table.take_changes()
        actions: list[Action] = []
        for start in range(0, max(len(added), len(removed)), HASHES_PER_MESSAGE):
            self._seq += 1
            part = slice(start, start + HASHES_PER_MESSAGE)
            batch = PoolEvents(
                self._seq, Tier.DRAM, join_hashes(added[part]), join_hashes(removed[part])
            )
            actions.append(TellConductor(batch))
        return actions

    def _snapshot(self) -> list[Action]:
        self.table.take_changes()  # the snapshot holds them already
        hashes = self.table.public_hashes()
        starts = range(0, max(1, len(hashes)), HASHES_PER_MESSAGE)
        return [
            TellConductor(
                PoolSnapshot(
                    self._seq,
                    Tier.DRAM,
                    join_hashes(hashes[start : start + HASHES_PER_MESSAGE]),
                    start == starts[-1],
                )
            )
            for start in starts
        ]

    def report(
        self, links: Sequence[LinkSample], transfers: Sequence[TransferTotals]
    ) -> PoolReport:
        """Return the periodic report, with what the shell measured of its links."""
        counts = self.table.count()
        return PoolReport(
            num_free=counts[SlotState.FREE],
            num_reserved=counts[SlotState.RESERVED],
            num_committed=counts[SlotState.COMMITTED],
            num_quarantined=counts[SlotState.QUARANTINED],
            num_leases=self.table.num_leases,
            links=tuple(links),
            num_evicting=counts[SlotState.EVICTING],
            totals=PoolTotals(
                num_evicted_blocks=self.table.num_evicted,
                num_fetched_blocks=self.counters["blocks_fetched"],
                num_corrupted_blocks=self.counters["blocks_corrupt"]
                + self.counters["blocks_mismatched"],
                num_expired_leases=self.table.num_expired_leases,
            ),
            transfers=tuple(transfers),
        )

    def stats(self) -> PoolStats:
        """Return slots by state and counters since start."""
        counts = self.table.count()
        counters = {
            **self.counters,
            "blocks_evicted": self.table.num_evicted,
            "leases_expired": self.table.num_expired_leases,
        }
        return PoolStats(
            num_slots=self.table.layout.num_slots,
            slot_bytes=self.table.layout.slot_bytes,
            num_free=counts[SlotState.FREE],
            num_reserved=counts[SlotState.RESERVED],
            num_committed=counts[SlotState.COMMITTED],
            num_evicting=counts[SlotState.EVICTING],
            num_quarantined=counts[SlotState.QUARANTINED],
            num_leases=self.table.num_leases,
            num_transfers=self.table.num_transfers,
            counters=tuple(sorted(counters.items())),
        )

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number


def _split(raw: bytes) -> list[BlockHash]:
    try:
        return split_hashes(raw)
    except ValueError as error:
        raise WireError(str(error)) from None
