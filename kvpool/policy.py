"""Which block to evict: pure policies, chosen by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from core.ids import BlockHash


class EvictionPolicy(Protocol):
    """Orders the blocks that may be evicted now: committed, public, held by nobody.

    The slot table calls `held` when a block gets its first holder, `released` when it lost its
    last one, and `forgotten` when it is gone for another reason than eviction.
    """

    def released(self, block_hashes: Sequence[BlockHash]) -> None:
        """These may be evicted from now on; given in prefix order, first block first."""
        ...

    def held(self, block_hash: BlockHash) -> None:
        """This one is in use again."""
        ...

    def forgotten(self, block_hash: BlockHash) -> None:
        """This one is no longer here."""
        ...

    def pop_victim(self) -> BlockHash | None:
        """Choose, remove and return the block to evict; `None` when there is none."""
        ...

    def __len__(self) -> int:
        """How many may be evicted."""
        ...


class LruPolicy:
    """Least recently used first; of a prefix released at once, its later blocks first."""

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[BlockHash, None] = OrderedDict()

    def released(self, block_hashes: Sequence[BlockHash]) -> None:
        """See `EvictionPolicy`."""
        # A later block is of no use without the earlier ones, so it must look older than they do.
        for block_hash in reversed(block_hashes):
            self._oldest_first[block_hash] = None

    def held(self, block_hash: BlockHash) -> None:
        """See `EvictionPolicy`."""
        del self._oldest_first[block_hash]

    def forgotten(self, block_hash: BlockHash) -> None:
        """See `EvictionPolicy`."""
        del self._oldest_first[block_hash]

    def pop_victim(self) -> BlockHash | None:
        """See `EvictionPolicy`."""
        return self._oldest_first.popitem(last=False)[0] if self._oldest_first else None

    def __len__(self) -> int:
        """See `EvictionPolicy`."""
        return len(self._oldest_first)
