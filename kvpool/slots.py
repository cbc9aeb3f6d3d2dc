"""The slot table of a pool node: who may read, write or reuse each slot. Pure.

    free -> reserved -> committed -> (leased) -> evicting -> free
               |
               +-> quarantined -> free

- A *transfer* (one link and one attempt) holds slots: reserved ones, leases on public blocks, and
  committed blocks of its own (private ones, and copies of a block that somebody committed first).
- A *link* is one connection; a reconnect is another link. A link may be the one writer of a slot,
  whoever reserved it. A reserved slot whose transfer lets go of it while a writer (or the
  verification of its bytes) is still at it is quarantined, not freed.
- `evicting` slots are no longer found by hash; they wait for their last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.errors import InvariantError
from core.ids import BlockHash, Incarnation, SlotHandle
from core.messages.to_pool import (
    AlreadyCommitted,
    BlocksLeased,
    BlockWritten,
    LeasedBlock,
    ReserveOutcome,
    SlotReserved,
    SlotsExhausted,
)
from kvpool.checksum import CHECKSUM_BYTES, block_checksum, unpack_checksums
from kvpool.memory import Layout
from kvpool.policy import EvictionPolicy
from kvpool.public import PublicIndex
from kvpool.records import SELF, Generations, LinkId, Slot, SlotState, Transfer, TransferKey
from kvpool.validation import check_indexes, check_slots


class SlotTable:
    """See the module's docstring. Methods take the time as `now_s`, any monotonic clock."""

    def __init__(
        self,
        layout: Layout,
        incarnation: Incarnation,
        policy: EvictionPolicy,
        *,
        reserve_ttl_s: float,
        generations: Generations | None = None,
    ) -> None:
        """`generations[slot]` is raised at each use; the node passes shared memory here."""
        self.layout = layout
        self.num_expired_leases = self.num_evicted = 0
        self._incarnation = incarnation
        self._policy = policy
        self._reserve_ttl_s = reserve_ttl_s
        self._generations: Generations = (
            [0] * layout.num_slots if generations is None else generations
        )
        self._slots = [Slot() for _ in range(layout.num_slots)]
        self._free = list(range(layout.num_slots - 1, -1, -1))
        self._index = PublicIndex()
        self._transfers: dict[TransferKey, Transfer] = {}
        self._writing: dict[LinkId, set[int]] = {}
        self._reads: dict[int, tuple[int, ...]] = {}
        self._commits: dict[TransferKey, list[LeasedBlock]] = {}
        self._losses: dict[TransferKey, list[SlotHandle]] = {}

    # --- reading ---

    def lease(
        self, key: TransferKey, block_hashes: Sequence[BlockHash], ttl_s: float, now_s: float
    ) -> BlocksLeased:
        """Lease the longest public prefix of `block_hashes`; renew the transfer."""
        transfer = self._renew(key, ttl_s, now_s)
        indexes = self._index.prefix(block_hashes)
        for index in indexes:
            if index not in transfer.slots:
                transfer.slots[index] = None
                self._hold(index)
        self._forget_empty(key)
        return self.pack(indexes)

    def release(self, key: TransferKey, handles: Iterable[SlotHandle]) -> None:
        """Give back leases and own committed blocks; what the transfer lacks is passed over."""
        if (transfer := self._transfers.get(key)) is None:
            return
        found = dict.fromkeys(i for h in handles if (i := self.find(h)) is not None)
        indexes = [i for i in found if i in transfer.slots]
        self._let_go(key, [i for i in indexes if self._slots[i].state is not SlotState.RESERVED])

    def read(self, read_id: int, block_hashes: Sequence[BlockHash]) -> tuple[int, ...]:
        """Hold the longest public prefix in place until `end_read`; return the slots' numbers."""
        indexes = self._reads[read_id] = tuple(self._index.prefix(block_hashes))
        for index in indexes:
            self._hold(index)
        return indexes

    def end_read(self, read_id: int) -> None:
        """The bytes are with the kernel, or the reader is gone."""
        self._drop_holders(self._reads.pop(read_id))

    def drop_corrupt(self, handle: SlotHandle) -> bool:
        """Hide a public block whose bytes are wrong; its slot is freed with its last reader."""
        index = self.find(handle)
        if index is None or not self._is_public(index):
            return False
        slot = self._slots[index]
        assert slot.block_hash is not None
        if not slot.num_holders:
            self._policy.forgotten(slot.block_hash)
        self._hide(index)
        if not slot.num_holders:
            self._free_slot(index)
        return True

    # --- reserving ---

    def reserve(
        self,
        key: TransferKey,
        block_hashes: Sequence[BlockHash],
        num_private: int,
        ttl_s: float,
        now_s: float,
    ) -> tuple[ReserveOutcome, ...]:
        """Reserve a slot per hash and private block, or lease what is here already.

        A hash the transfer has a reserved slot for gets that slot again. Slots are all or
        nothing; leases are given in any case.
        """
        transfer = self._renew(key, ttl_s, now_s)
        mine = {
            h: i
            for i in transfer.slots
            if self._slots[i].state is SlotState.RESERVED
            and (h := self._slots[i].block_hash) is not None
        }
        held = {
            h: self._lease_slot(transfer, i)
            for h in block_hashes
            if (i := self._index.get(h)) is not None
        }
        num_wanted = num_private + len({h for h in block_hashes if h not in held and h not in mine})
        fits = num_wanted <= len(self._free) + len(self._policy)
        outcomes: list[ReserveOutcome] = []
        for block_hash in (*block_hashes, *(None,) * num_private):
            if block_hash is not None and block_hash in held:
                outcomes.append(AlreadyCommitted(held[block_hash]))
            elif block_hash is not None and block_hash in mine:
                outcomes.append(SlotReserved(self.handle(mine[block_hash])))
            elif not fits:
                outcomes.append(SlotsExhausted())
            else:
                index = self._take_slot(key, block_hash)
                transfer.slots[index] = None
                if block_hash is not None:
                    mine[block_hash] = index
                outcomes.append(SlotReserved(self.handle(index)))
        self._forget_empty(key)
        return tuple(outcomes)

    def close(self, key: TransferKey) -> None:
        """Give back everything of the transfer; slots under a writer are quarantined."""
        if (transfer := self._transfers.get(key)) is not None:
            self._let_go(key, list(transfer.slots))

    # --- writing ---

    def begin(self, link: LinkId, handles: Iterable[SlotHandle]) -> tuple[bool, ...]:
        """Make `link` the writer of each slot that is reserved and has no other writer."""
        return tuple(self._begin(link, handle) for handle in handles)

    def _begin(self, link: LinkId, handle: SlotHandle) -> bool:
        index = self.find(handle)
        if index is None:
            return False
        slot = self._slots[index]
        if (
            slot.state is not SlotState.RESERVED
            or slot.verifying
            or slot.writer not in (None, link)
        ):
            return False
        slot.writer = link
        self._writing.setdefault(link, set()).add(index)
        return True

    def writable(self, link: LinkId, handle: SlotHandle) -> int | None:
        """Return the slot's number if `link` may write there now."""
        index = self.find(handle)
        if index is None:
            return None
        slot = self._slots[index]
        may = slot.state is SlotState.RESERVED and slot.writer == link and not slot.verifying
        return index if may else None

    def end(self, link: LinkId, handles: Iterable[SlotHandle]) -> None:
        """`link` will not write these again. A reserved slot stays reserved for its transfer."""
        for handle in handles:
            if (index := self.find(handle)) is not None and self._slots[index].writer == link:
                self._end_writing(index)

    def begin_verify(self, link: LinkId, blocks: Iterable[BlockWritten]) -> tuple[bool, ...]:
        """End the writes of `link`; say which blocks' bytes are now to be verified.

        A slot under verification is neither written nor reused until `finish_verify`.
        """
        accepted = []
        for block in blocks:
            index = self.writable(link, block.handle)
            well_formed = len(block.slice_checksums) == CHECKSUM_BYTES * self.layout.num_layers
            if index is not None and well_formed:
                self._slots[index].verifying = True
                self._end_writing(index)
                accepted.append(True)
            else:
                self.end(link, (block.handle,))
                accepted.append(False)
        return tuple(accepted)

    def finish_verify(
        self, block: BlockWritten, good: bool, now_s: float, *, fetched: bool = False
    ) -> bool:
        """Commit or drop a block after `begin_verify` accepted it; return whether committed.

        A block the node `fetched` itself needs no notice to its owner, and no second copy.
        """
        index = self.find(block.handle)
        if index is None or not self._slots[index].verifying:
            raise InvariantError(f"{block.handle} is not under verification")
        slot = self._slots[index]
        slot.verifying = False
        key = slot.owner
        if slot.state is SlotState.QUARANTINED or key is None:
            self._free_slot(index)
            return False
        if not good or (fetched and slot.block_hash in self._index):
            self._lose(index, silently=fetched)
            return False
        slot.state = SlotState.COMMITTED
        slot.slice_checksums = block.slice_checksums
        slot.checksum = block_checksum(unpack_checksums(block.slice_checksums))
        if slot.block_hash is not None and slot.block_hash not in self._index:
            slot.owner = None
            slot.num_holders = 1
            self._index.add(slot.block_hash, index)
        transfer = self._transfers[key]
        transfer.expires_s = max(transfer.expires_s, now_s + transfer.ttl_s)
        if not fetched:
            self._commits.setdefault(key, []).append(self._leased_block(index))
        return True

    def abandon(self, handles: Iterable[SlotHandle]) -> None:
        """Free slots the node reserved to fetch into and will not fill."""
        for handle in handles:
            index = self.find(handle)
            if index is not None and self._slots[index].writer == SELF:
                reserved = self._slots[index].state is SlotState.RESERVED
                self._end_writing(index)
                if reserved:
                    self._lose(index, silently=True)

    # --- time and loss ---

    def drop_link(self, link: LinkId) -> None:
        """The connection is gone: so are its transfers and its writes."""
        for key in [k for k in self._transfers if k.link == link]:
            self.close(key)
        for index in sorted(self._writing.get(link, ())):
            reserved = self._slots[index].state is SlotState.RESERVED
            self._end_writing(index)
            if reserved:
                self._lose(index)

    def expire(self, now_s: float) -> None:
        """End leases whose time is over, and reservations that nobody began to write."""
        for key, transfer in list(self._transfers.items()):
            if now_s >= transfer.reserve_expires_s:
                for index in list(transfer.slots):
                    slot = self._slots[index]
                    idle = slot.writer is None and not slot.verifying
                    if slot.state is SlotState.RESERVED and idle:
                        self._lose(index)
            if now_s >= transfer.expires_s and key in self._transfers:
                over = [i for i in transfer.slots if self._slots[i].state is not SlotState.RESERVED]
                self.num_expired_leases += len(over)
                self._let_go(key, over)

    # --- what happened ---

    def take_commits(self) -> dict[TransferKey, list[LeasedBlock]]:
        """Return, once, the blocks that became readable by their transfers."""
        taken, self._commits = self._commits, {}
        return taken

    def take_losses(self) -> dict[TransferKey, list[SlotHandle]]:
        """Return, once, the reserved slots that transfers lost."""
        taken, self._losses = self._losses, {}
        return taken

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return, once, the hashes (added, removed) since the last call; none is in both."""
        return self._index.take_changes()

    def has(self, block_hash: BlockHash) -> bool:
        """Whether the block can be leased or read."""
        return block_hash in self._index

    def public_hashes(self) -> list[BlockHash]:
        """Return every hash that can be leased or read."""
        return self._index.hashes()

    def count(self) -> dict[SlotState, int]:
        """Return the number of slots in each state."""
        counts = dict.fromkeys(SlotState, 0)
        for slot in self._slots:
            counts[slot.state] += 1
        return counts

    @property
    def num_leases(self) -> int:
        """Committed blocks held by transfers, a block once per transfer."""
        return sum(
            self._slots[i].state is not SlotState.RESERVED
            for t in self._transfers.values()
            for i in t.slots
        )

    @property
    def num_transfers(self) -> int:
        """Transfers that hold something."""
        return len(self._transfers)

    def has_transfer(self, key: TransferKey) -> bool:
        """Whether the transfer holds something."""
        return key in self._transfers

    def handle(self, index: int) -> SlotHandle:
        """Name a slot in its present use."""
        segment, slot = divmod(index, self.layout.slots_per_segment)
        return SlotHandle(segment, slot, self._incarnation, self._generations[index])

    def pack(self, indexes: Sequence[int]) -> BlocksLeased:
        """Describe leased slots for the wire."""
        return BlocksLeased.pack(
            self._incarnation,
            self.layout.slots_per_segment,
            indexes,
            [self._generations[i] for i in indexes],
            [self._slots[i].checksum for i in indexes],
        )

    def find(self, handle: SlotHandle) -> int | None:
        """Return the slot's number, or `None` when there is no such slot or that use is over."""
        if handle.incarnation != self._incarnation or handle not in self.layout:
            return None
        index = self.layout.index(handle)
        return index if self._generations[index] == handle.generation else None

    def slice_checksums(self, index: int) -> bytes:
        """Return the packed checksums of a committed block."""
        return self._slots[index].slice_checksums

    # --- inside ---

    def _renew(self, key: TransferKey, ttl_s: float, now_s: float) -> Transfer:
        reserve_expires_s = now_s + min(ttl_s, self._reserve_ttl_s)
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = Transfer(ttl_s, now_s + ttl_s, reserve_expires_s)
            self._transfers[key] = transfer
        transfer.ttl_s = ttl_s
        transfer.expires_s = max(transfer.expires_s, now_s + ttl_s)
        transfer.reserve_expires_s = max(transfer.reserve_expires_s, reserve_expires_s)
        return transfer

    def _forget_empty(self, key: TransferKey) -> None:
        if not self._transfers[key].slots:
            del self._transfers[key]

    def _is_public(self, index: int) -> bool:
        slot = self._slots[index]
        return slot.state is SlotState.COMMITTED and slot.owner is None

    def _leased_block(self, index: int) -> LeasedBlock:
        return LeasedBlock(self.handle(index), self._slots[index].checksum)

    def _lease_slot(self, transfer: Transfer, index: int) -> LeasedBlock:
        if index not in transfer.slots:
            transfer.slots[index] = None
            self._hold(index)
        return self._leased_block(index)

    def _hold(self, index: int) -> None:
        slot = self._slots[index]
        if not slot.num_holders:
            assert slot.block_hash is not None
            self._policy.held(slot.block_hash)
        slot.num_holders += 1

    def _drop_holders(self, indexes: Iterable[int]) -> None:
        """Take one holder off each; tell the policy about all that lost their last at once."""
        released = []
        for index in indexes:
            slot = self._slots[index]
            slot.num_holders -= 1
            if slot.num_holders:
                continue
            if slot.state is SlotState.EVICTING:
                self._free_slot(index)
            else:
                assert slot.block_hash is not None
                released.append(slot.block_hash)
        self._policy.released(released)

    def _let_go(self, key: TransferKey, indexes: Iterable[int]) -> None:
        """Take slots from a transfer without telling its owner."""
        transfer = self._transfers[key]
        leased = []
        for index in indexes:
            del transfer.slots[index]
            slot = self._slots[index]
            if slot.owner is None:
                leased.append(index)
            elif slot.writer is not None or slot.verifying:
                slot.state = SlotState.QUARANTINED
                slot.owner = None
            else:
                self._free_slot(index)
        self._drop_holders(leased)
        self._forget_empty(key)

    def _lose(self, index: int, *, silently: bool = False) -> None:
        """Free a reserved slot that has no writer, and tell its owner."""
        slot = self._slots[index]
        key = slot.owner
        assert key is not None
        if not silently:
            self._losses.setdefault(key, []).append(self.handle(index))
        self._let_go(key, (index,))

    def _end_writing(self, index: int) -> None:
        slot = self._slots[index]
        assert slot.writer is not None
        writing = self._writing[slot.writer]
        writing.discard(index)
        if not writing:
            del self._writing[slot.writer]
        slot.writer = None
        if slot.state is SlotState.QUARANTINED:
            self._free_slot(index)

    def _take_slot(self, key: TransferKey, block_hash: BlockHash | None) -> int:
        """Reserve a free slot, evicting if need be. The caller made sure that one is there."""
        if not self._free:
            victim = self._policy.pop_victim()
            assert victim is not None
            index = self._index.get(victim)
            assert index is not None
            self._hide(index)
            self._free_slot(index)
            self.num_evicted += 1
        index = self._free.pop()
        self._generations[index] += 1
        self._slots[index] = Slot(SlotState.RESERVED, block_hash, key)
        return index

    def _hide(self, index: int) -> None:
        slot = self._slots[index]
        assert slot.block_hash is not None
        self._index.remove(slot.block_hash)
        slot.state = SlotState.EVICTING

    def _free_slot(self, index: int) -> None:
        self._slots[index] = Slot()
        self._free.append(index)

    # --- checking ---

    def validate(self) -> None:
        """Derive every redundant index afresh. Raises `InvariantError` with what is wrong."""
        check_slots(self._slots, self._transfers, self._reads.values())
        check_indexes(
            self._slots, self._free, self._index.by_hash(), self._writing, len(self._policy)
        )
