"""Invariants 1 and 2 of the slot table, derived afresh from its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.errors import InvariantError
from core.ids import BlockHash
from kvpool.records import LinkId, Slot, SlotState, Transfer, TransferKey


def check_slots(
    slots: Sequence[Slot],
    transfers: Mapping[TransferKey, Transfer],
    reads: Iterable[Sequence[int]],
) -> None:
    """Recount the holders and the owner of every slot; check each against its state."""
    holders = [0] * len(slots)
    owners: dict[int, TransferKey] = {}
    for key, transfer in transfers.items():
        _require(bool(transfer.slots), f"{key} holds nothing")
        for index in transfer.slots:
            if slots[index].owner is None:
                holders[index] += 1
            else:
                _require(index not in owners, f"slot {index} has two owners")
                owners[index] = key
    for read in reads:
        for index in read:
            holders[index] += 1
    for index, slot in enumerate(slots):
        _check_slot(index, slot, holders[index], owners.get(index))


def _check_slot(index: int, slot: Slot, holders: int, owner: TransferKey | None) -> None:
    story = f"slot {index}: {slot}, {holders} holders, owner {owner}"
    _require(slot.num_holders == holders and slot.owner == owner, story)
    _require(slot.writer is None or not slot.verifying, story)
    touched = slot.writer is not None or slot.verifying
    match slot.state:
        case SlotState.FREE:
            _require(slot == Slot(), story)
        case SlotState.RESERVED:
            _require(owner is not None and not slot.slice_checksums, story)
        case SlotState.COMMITTED:
            _require(not touched and bool(slot.slice_checksums), story)
        case SlotState.EVICTING:
            _require(not touched and holders > 0, story)
        case SlotState.QUARANTINED:
            _require(touched and owner is None and not holders, story)


def check_indexes(
    slots: Sequence[Slot],
    free: Sequence[int],
    index: Mapping[BlockHash, int],
    writing: Mapping[LinkId, set[int]],
    num_evictable: int,
) -> None:
    """Derive the free list, the index by hash, the writers and the eviction candidates anew."""
    numbered = list(enumerate(slots))
    expected = [i for i, s in numbered if s.state is SlotState.FREE]
    _require(sorted(free) == expected, "the free list is wrong")
    public = [i for i, s in numbered if s.state is SlotState.COMMITTED and s.owner is None]
    _require(sorted(index.values()) == public, "the index by hash is wrong")
    _require(all(slots[i].block_hash == h for h, i in index.items()), "a hash is elsewhere")
    _require(
        num_evictable == sum(not slots[i].num_holders for i in public),
        "the policy knows other blocks",
    )
    _require(
        {(s.writer, i) for i, s in numbered if s.writer is not None}
        == {(link, i) for link, indexes in writing.items() for i in indexes},
        "the index of writers is wrong",
    )


def _require(holds: bool, story: str) -> None:
    if not holds:
        raise InvariantError(story)
