"""Sets of holders as bit masks, each kept once however many blocks have it. Pure.

Blocks of one prefix have the same holders, so there are few different sets. A block's entry is the
set's number; 0 is the empty set. Changing what a bit means for all blocks (a node is gone, its
snapshot is complete) changes the sets and no entry. Two numbers may then have one mask; those of
them that are not the first are stale, as are all whose mask became empty, until `move` took their
last block away.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from core.errors import InvariantError
from kvpool.block_table import Numbers


class HolderSets:
    """See the module's docstring. `masks[number]` is the set; `counts[number]` its blocks."""

    def __init__(self) -> None:
        self.masks = [0]
        self.counts = [0]
        self.num_stale = 0
        self._numbers = {0: 0}
        self._unused: list[int] = []
        self._stale = np.zeros(64, np.bool_)

    def move(self, numbers: Numbers, change: Callable[[int], int]) -> Numbers:
        """Take one block from each set to the one with the changed mask; return its number."""
        distinct, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        pairs = list(zip(distinct.tolist(), counts.tolist(), strict=True))
        changed = []
        for number, count in pairs:
            target = self._number(change(self.masks[number]))
            self.counts[target] += count
            changed.append(target)
        for number, count in pairs:
            self.counts[number] -= count
            if number and not self.counts[number]:
                self._forget(number)
        self.counts[0] = 0
        return np.array(changed, np.uint32)[inverse]

    def _number(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            number = self._unused.pop() if self._unused else len(self.masks)
            if number == len(self.masks):
                self.masks.append(mask)
                self.counts.append(0)
            else:
                self.masks[number] = mask
            self._numbers[mask] = number
        return number

    def _forget(self, number: int) -> None:
        if self._numbers.get(self.masks[number]) == number:
            del self._numbers[self.masks[number]]
        if number < len(self._stale) and self._stale[number]:
            self._stale[number] = False
            self.num_stale -= 1
        self.masks[number] = 0
        self._unused.append(number)

    def rewrite(self, bits: int, change: Callable[[int], int]) -> None:
        """Change every mask that has one of `bits`. Takes time per set, not per block."""
        touched = [n for n, mask in enumerate(self.masks) if mask & bits]
        for number in touched:
            if self._numbers.get(self.masks[number]) == number:
                del self._numbers[self.masks[number]]
        if len(self._stale) < len(self.masks):
            self._stale.resize(2 * len(self.masks), refcheck=False)
        for number in touched:
            mask = self.masks[number] = change(self.masks[number])
            is_stale = self._numbers.setdefault(mask, number) != number
            self.num_stale += is_stale - int(self._stale[number])
            self._stale[number] = is_stale

    def find_stale(self, numbers: Numbers) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Return which of `numbers` are stale."""
        if len(self._stale) < len(self.masks):
            self._stale.resize(2 * len(self.masks), refcheck=False)
        return np.flatnonzero(self._stale[numbers])

    def validate(self, numbers: Numbers) -> None:
        """Compare with the numbers of all entries. Raises `InvariantError`."""
        counts = np.bincount(numbers, minlength=len(self.masks)).tolist()
        if counts != self.counts:
            raise InvariantError("the sets' counts of blocks are wrong")
        used = {n for n, count in enumerate(counts) if count}
        if used & set(self._unused) or len(used) + len(self._unused) + 1 != len(counts):
            raise InvariantError("a set without blocks is kept, or one with blocks is not")
        fresh = [n for n in used if n >= len(self._stale) or not self._stale[n]]
        if {0: 0, **{self.masks[n]: n for n in fresh}} != self._numbers:
            raise InvariantError("a mask is not found by its number")
        if len(used) - len(fresh) != self.num_stale or self._stale.sum() != self.num_stale:
            raise InvariantError("the count of stale sets is wrong")
