"""Who owns which block of a paged KV cache, and which blocks can be reused by content. Pure.

A block is *free* (no content worth keeping), *cached* (content known by its hash, nobody uses it)
or *in use* (`ref_count > 0`). Allocation takes free blocks first, then evicts cached ones, least
recently released first; `release` puts the later blocks of a table where they are evicted before
the earlier ones, because a prefix is useless without its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from core.errors import InvariantError
from core.ids import BlockHash


class PagedAllocator:
    """Reference counts and the content index of `num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_count = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    def match(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest known prefix of `block_hashes`, without taking them."""
        found: list[int] = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found: they are neither evicted nor changed meanwhile."""
        for block in blocks:
            if self._ref_count[block] == 0:
                if block not in self._cached:
                    raise InvariantError(f"block {block} is free and cannot be acquired")
                del self._cached[block]
            self._ref_count[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each; `None`, and no change, if too few."""
        if count > self.num_available:
            return None
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            taken.append(block)
        for block in taken:
            self._ref_count[block] = 1
        return taken

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Say what a held block contains, once every byte is there. Later content may not change.

        If the content is known in another block already, that one stays the one to be found.
        """
        if self._ref_count[block] == 0:
            raise InvariantError(f"block {block} is not held and cannot be published")
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a table, in table order."""
        for block in reversed(blocks):
            count = self._ref_count[block]
            if count == 0:
                raise InvariantError(f"block {block} is released more often than taken")
            self._ref_count[block] = count - 1
            if count == 1:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def drop_cached(self, block_hash: BlockHash) -> None:
        """Forget a content that proved wrong. A holder keeps the block itself."""
        block = self._block_of.get(block_hash)
        if block is None:
            return
        self._forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def validate(self, tables: Sequence[Sequence[int]]) -> None:
        """Re-derive everything from the block tables of all holders. Raises `InvariantError`."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        if counts != self._ref_count:
            wrong = [b for b in range(self.num_blocks) if counts[b] != self._ref_count[b]]
            raise InvariantError(f"reference counts of blocks {wrong[:8]} are wrong")
        idle = set(self._free) | set(self._cached)
        if len(self._free) + len(self._cached) != len(idle):
            raise InvariantError("a block is free twice")
        if idle != {b for b in range(self.num_blocks) if counts[b] == 0}:
            raise InvariantError("free and cached blocks are not those without holders")
        if {h: b for b, h in self._hash_of.items()} != self._block_of:
            raise InvariantError("the two content indexes differ")
        if not set(self._cached) <= set(self._hash_of):
            raise InvariantError("a cached block has no content")
