"""Which blocks of a node can be found by hash, and what changed there since the last batch."""

from __future__ import annotations

from collections.abc import Sequence

from core.ids import BlockHash


class PublicIndex:
    """Block hash to slot number, with the net changes for the directory."""

    def __init__(self) -> None:
        self._slots: dict[BlockHash, int] = {}
        self._added: set[BlockHash] = set()
        self._removed: set[BlockHash] = set()

    def __contains__(self, block_hash: object) -> bool:
        """Whether the block is public."""
        return block_hash in self._slots

    def get(self, block_hash: BlockHash) -> int | None:
        """Return the block's slot, `None` when it is not public."""
        return self._slots.get(block_hash)

    def prefix(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Return the slots of the longest prefix that is public."""
        found = []
        for block_hash in block_hashes:
            if (index := self._slots.get(block_hash)) is None:
                break
            found.append(index)
        return found

    def add(self, block_hash: BlockHash, index: int) -> None:
        """Publish a block that is not public yet."""
        self._slots[block_hash] = index
        # Gone and back between two batches is no change, and so is the reverse.
        if block_hash in self._removed:
            self._removed.discard(block_hash)
        else:
            self._added.add(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """Hide a public block."""
        del self._slots[block_hash]
        if block_hash in self._added:
            self._added.discard(block_hash)
        else:
            self._removed.add(block_hash)

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return, once, the hashes (added, removed) since the last call; none is in both."""
        taken = sorted(self._added), sorted(self._removed)
        self._added, self._removed = set(), set()
        return taken

    def hashes(self) -> list[BlockHash]:
        """Return every public hash, in the order they came."""
        return list(self._slots)

    def by_hash(self) -> dict[BlockHash, int]:
        """Return the slot of every public hash; not to be changed."""
        return self._slots
