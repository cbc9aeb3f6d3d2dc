"""The slot table and the node's state machine, by example; `test_slots_model.py` has the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import WireError
from core.hashing import join_hashes
from core.ids import Address, Incarnation, PoolRef, SlotHandle
from core.messages.to_conductor import PoolEvents, PoolSnapshot
from core.messages.to_pool import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReserved,
    BlockWritten,
    CommitBlocks,
    FetchBlocks,
    LeaseBlocks,
    ReserveBlocks,
    SlotReserved,
    Tier,
    TransferLoss,
    WriteSlices,
)
from kvpool import state as state_module
from kvpool.checksum import pack_checksums
from kvpool.events import (
    BlocksVerified,
    ConductorRegistered,
    LinkClosed,
    Refuse,
    Reply,
    Requested,
    Tell,
    TellConductor,
    Ticked,
    VerifyBlocks,
)
from kvpool.records import LinkId, SlotState, TransferKey
from kvpool.state import PoolNodeState
from tests.kvpool.harness import CONFIG, LAYERS, attempt, block_hash, hashes

OWNER, WRITER = LinkId(1), LinkId(2)
KEY = TransferKey(OWNER, attempt(1))
CHECKSUMS = pack_checksums(range(LAYERS))


def fresh(**changes) -> PoolNodeState:
    ref = PoolRef("N0", Incarnation("a" * 16), Address("host", 1))
    return PoolNodeState(replace(CONFIG, **changes), ref)


def reserved(node: PoolNodeState, *numbers: int, ttl_s: float = 5.0) -> list[SlotHandle]:
    outcomes = node.table.reserve(KEY, hashes(*numbers), 0, ttl_s, 0.0)
    handles = [o.handle for o in outcomes if isinstance(o, SlotReserved)]
    assert node.table.begin(WRITER, handles) == (True,) * len(numbers)
    return handles


def committing(node: PoolNodeState, handles: list[SlotHandle]) -> VerifyBlocks:
    message = CommitBlocks(tuple(BlockWritten(h, CHECKSUMS) for h in handles))
    (action,) = node.handle(Requested(0.0, WRITER, 77, message))
    assert isinstance(action, VerifyBlocks)
    return action


def test_a_slot_under_verification_is_nobodys():
    node = fresh()
    (handle,) = reserved(node, 1)
    verify = committing(node, [handle])
    assert node.table.begin(WRITER, [handle]) == (False,)
    assert node.table.writable(WRITER, handle) is None
    assert node.handle(LinkClosed(1.0, WRITER)) == []  # all its bytes are here
    node.handle(Ticked(100.0))
    assert node.table.count()[SlotState.RESERVED] == 1  # nor does it run out
    actions = node.handle(BlocksVerified(100.0, verify.verification, (True,)))
    assert Reply(WRITER, 77, BlocksCommitted((True,))) in actions
    node.table.validate()


def test_an_aborted_slot_stays_until_its_verification_ends():
    node = fresh(num_slots=1)
    verify = committing(node, reserved(node, 1))
    node.handle(LinkClosed(1.0, OWNER))
    assert node.table.count()[SlotState.QUARANTINED] == 1
    node.table.validate()
    assert node.handle(BlocksVerified(1.0, verify.verification, (True,))) == [
        Reply(WRITER, 77, BlocksCommitted((False,)))
    ]
    assert node.table.count()[SlotState.FREE] == 1


def test_the_lease_of_a_committed_block_begins_with_the_commit():
    node = fresh(reserve_ttl_s=100.0)
    verify = committing(node, reserved(node, 1, ttl_s=5.0))
    node.handle(BlocksVerified(4.0, verify.verification, (True,)))
    node.handle(Ticked(8.9))
    assert node.table.num_leases == 1
    node.handle(Ticked(9.0))
    assert node.table.num_leases == 0


def test_a_writer_that_dies_costs_its_slots_at_once():
    node = fresh()
    handles = reserved(node, 1, 2)
    assert node.handle(LinkClosed(1.0, WRITER)) == [
        Tell(OWNER, TransferLoss(attempt(1), tuple(handles)))
    ]
    assert node.table.count()[SlotState.FREE] == CONFIG.num_slots


def test_a_malformed_commit_ends_the_writes_but_keeps_the_reservation():
    node = fresh()
    (handle,) = reserved(node, 1)
    message = CommitBlocks((BlockWritten(handle, CHECKSUMS[:-8]),))
    assert node.handle(Requested(0.0, WRITER, 7, message)) == [
        Reply(WRITER, 7, BlocksCommitted((False,)))
    ]
    assert node.table.begin(WRITER, [handle]) == (True,)


def test_batches_are_numbered_split_and_net(monkeypatch):
    monkeypatch.setattr(state_module, "HASHES_PER_MESSAGE", 2)
    node = fresh()
    handles = reserved(node, 1, 2, 3)
    verify = committing(node, handles)
    node.handle(BlocksVerified(0.0, verify.verification, (True,) * 3))
    node.table.drop_corrupt(handles[1])  # came and went between two batches
    added = join_hashes(sorted(hashes(1, 3)))
    assert node.handle(Ticked(0.1)) == [TellConductor(PoolEvents(1, Tier.DRAM, added, b""))]
    assert node.handle(Ticked(0.2)) == []

    verify = committing(node, reserved(node, 4))
    node.handle(BlocksVerified(0.0, verify.verification, (True,)))
    assert node.handle(ConductorRegistered()) == [
        TellConductor(PoolSnapshot(1, Tier.DRAM, join_hashes(hashes(1, 3)), False)),
        TellConductor(PoolSnapshot(1, Tier.DRAM, block_hash(4), True)),
    ]
    assert node.handle(Ticked(0.3)) == []  # the snapshot held the new ones


def test_one_transfer_too_many_is_refused():
    node = fresh(max_transfers=1)
    reserved(node, 1)
    for message in (
        LeaseBlocks(attempt(2), b"", 1.0),
        ReserveBlocks(attempt(2), b"", 1, 1.0),
        FetchBlocks(attempt(2), node.ref, b"", 1.0, 1.0),
    ):
        (refusal,) = node.handle(Requested(0.0, OWNER, 3, message))
        assert refusal == Refuse(OWNER, 3, "1 transfers are open")
    (reply,) = node.handle(Requested(0.0, OWNER, 4, ReserveBlocks(attempt(1), b"", 1, 1.0)))
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, BlocksReserved)


@pytest.mark.parametrize(
    "message",
    [
        LeaseBlocks(attempt(1), b"short", 1.0),
        LeaseBlocks(attempt(1), b"", 0.0),
        LeaseBlocks(attempt(1), b"", float("nan")),
        LeaseBlocks(attempt(1), b"", float("inf")),
        ReserveBlocks(attempt(1), b"", -1, 1.0),
        ReserveBlocks(attempt(1), b"", 1 << 60, 1.0),
        BlocksLeased(Incarnation("f" * 16), 1, b"", b"", b""),
    ],
)
def test_messages_no_honest_peer_sends(message):
    node = fresh()
    with pytest.raises(WireError):
        node.handle(Requested(0.0, OWNER, 1, message))
    node.table.validate()
    assert node.table.count()[SlotState.FREE] == CONFIG.num_slots


def test_slices_must_match_their_handles():
    node = fresh()
    (handle,) = reserved(node, 1)
    assert node.write_targets(WRITER, WriteSlices(0, (handle,), (1,))) == [0]
    assert node.write_targets(OWNER, WriteSlices(0, (handle,), (1,))) == [None]
    for bad in (WriteSlices(0, (handle,), ()), WriteSlices(LAYERS, (handle,), (1,))):
        with pytest.raises(WireError):
            node.write_targets(WRITER, bad)


def test_the_same_events_give_the_same_actions():
    def run() -> list[object]:
        node = fresh()
        verify = committing(node, reserved(node, 1, 2))
        lease = LeaseBlocks(attempt(5), block_hash(1), 1.0)
        return [
            *node.handle(BlocksVerified(0.0, verify.verification, (True, False))),
            *node.handle(Requested(1.0, OWNER, 9, lease)),
            *node.handle(Ticked(9.0)),
            node.stats(),
        ]

    assert run() == run()
