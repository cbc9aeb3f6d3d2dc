"""A hash table from 64-bit keys to small numbers: two numpy arrays, a whole batch at a time. Pure.

Keys must be spread evenly (they are parts of hashes) and never 0. Each key has two buckets of 8
slots and lies in the emptier one ("balanced allocations", Azar et al. 1999), so there are no
chains: a slot given up is free, and a look-up reads two buckets. The table doubles bucket by bucket
beside the insertions ("linear hashing", Litwin 1980), so no call has to move all of it; it never
shrinks. An entry takes 12 bytes at 40 to 80 % load.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.intp]

_Word = TypeVar("_Word", np.uint64, np.uint32)

_WIDTH = 8
_MIN_BUCKETS = 64
_LOW = np.uint64(0xFFFFFFFF)
_HALF_BITS = np.uint64(32)

_GROW_LOAD, _MAX_LOAD = 0.75, 0.8
"""Of the slots: where a doubling begins, and what it is never to come to."""

_SPLITS_PER_KEY = 4
"""Fast enough that a doubling is over before the load got there."""


class BlockTable:
    """See the module's docstring. A position is good until the next `place`."""

    def __init__(self) -> None:
        self.num_used = 0
        self._level = _MIN_BUCKETS
        self._num_split = 0
        self._keys = np.zeros(_MIN_BUCKETS * _WIDTH, np.uint64)
        self._numbers = np.zeros(_MIN_BUCKETS * _WIDTH, np.uint32)

    @property
    def num_slots(self) -> int:
        """Positions are below this."""
        return (self._level + self._num_split) * _WIDTH

    def find(self, keys: Keys) -> Positions:
        """Return where each key is, -1 where it is not."""
        found = np.full(len(keys), -1, np.intp)
        which, at = self._hits(keys)
        found[which] = at
        return found

    def look_up(self, keys: Keys) -> Numbers:
        """Return the number of each key, 0 for one that is not here."""
        numbers = np.zeros(len(keys), np.uint32)
        which, at = self._hits(keys)
        numbers[which] = self._numbers[at]
        return numbers

    def _hits(self, keys: Keys) -> tuple[Positions, Positions]:
        """Return which keys are here, and where."""
        homes = self._homes(keys)
        hits = np.flatnonzero(self._rows(self._keys).take(homes, axis=0) == keys[:, None, None])
        return hits // (2 * _WIDTH), homes.ravel()[hits // _WIDTH] * _WIDTH + hits % _WIDTH

    def place(self, keys: Keys) -> Positions:
        """Return where each of these different keys is; a new one gets the number 0."""
        found = self.find(keys)
        missing = np.flatnonzero(found < 0)
        if not len(missing):
            return found
        moved = self._make_room(len(missing))
        moved |= self._insert(keys[missing], missing, found)
        self.num_used += len(missing)
        return self.find(keys) if moved else found

    def get(self, positions: Positions) -> Numbers:
        """Return the numbers there."""
        return self._numbers[positions]

    def put(self, positions: Positions, numbers: Numbers) -> None:
        """Replace the numbers there; an entry whose number becomes 0 is removed."""
        self._numbers[positions] = numbers
        gone = positions[numbers == 0]
        self._keys[gone] = 0
        self.num_used -= len(gone)

    def part(self, first: int, count: int) -> Numbers:
        """Return the numbers from a position on, 0 where no entry is; not to be changed."""
        return self._numbers[first : min(first + count, self.num_slots)]

    def _rows(self, array: npt.NDArray[_Word]) -> npt.NDArray[_Word]:
        return array[: self.num_slots].reshape(-1, _WIDTH)

    def _homes(self, keys: Keys) -> Positions:
        """Return the two buckets of each key, [n, 2]."""
        halves = keys.view(np.uint32).reshape(-1, 2)
        homes = (halves & np.uint32(2 * self._level - 1)).astype(np.intp)
        homes -= self._level * (homes >= self._level + self._num_split)
        return homes

    def _insert(self, keys: Keys, into: Positions, found: Positions) -> bool:
        """Place new keys and note where at `found[into]`; return whether entries moved."""
        moved = False
        while len(keys):
            homes = self._homes(keys)
            free = self._rows(self._keys).take(homes, axis=0) == 0
            num_free = free.sum(axis=2)
            each = np.arange(len(keys))
            choice = num_free.argmax(axis=1)
            at = homes[each, choice] * _WIDTH + free[each, choice].argmax(axis=1)
            fits = num_free[each, choice] > 0
            self._keys[at[fits]] = keys[fits]
            won = fits & (self._keys[at] == keys)  # of several for one slot, the last one got it
            found[into[won]] = at[won]
            keys, into = keys[~won], into[~won]
            if not won.any():  # both buckets full: next to never, but then only splits help
                self._split(self._level)
                moved = True
        return moved

    def _make_room(self, num_keys: int) -> bool:
        """Go on with a doubling, or begin one; return whether entries moved."""
        num_used = self.num_used + num_keys
        if not self._num_split and num_used <= _GROW_LOAD * self.num_slots:
            return False
        self._split(_SPLITS_PER_KEY * num_keys)
        while num_used > _MAX_LOAD * self.num_slots:
            self._split(self._level)
        return True

    def _split(self, count: int) -> None:
        """Share the entries of the next buckets, at most `count`, with their upper halves."""
        level, first = self._level, self._num_split
        last = min(first + count, level)
        self._num_split = last
        if self.num_slots > len(self._keys):
            size = self.num_slots + self.num_slots // 16
            for array in (self._keys, self._numbers):
                array.resize(size, refcheck=False)  # by mremap: what is there stays there
        keys, numbers = self._rows(self._keys), self._rows(self._numbers)
        low, high = keys[first:last] & _LOW, keys[first:last] >> _HALF_BITS
        by_low = (low & np.uint64(level - 1)) == np.arange(first, last, dtype=np.uint64)[:, None]
        goes = (np.where(by_low, low, high) & np.uint64(level)) != 0
        for rows in (keys, numbers):
            rows[level + first : level + last] = np.where(goes, rows[first:last], 0)
            rows[first:last][goes] = 0
        if last == level:
            self._level, self._num_split = 2 * level, 0

    def entries(self) -> tuple[Keys, Numbers]:
        """Return a copy of all keys, ascending, and their numbers."""
        positions = np.flatnonzero(self._keys)
        positions = positions[np.argsort(self._keys[positions])]
        return self._keys[positions], self._numbers[positions]

    def validate(self) -> None:
        """Find every entry by its key. Raises `InvariantError`."""
        used = np.flatnonzero(self._keys)
        if len(used) != self.num_used or not np.array_equal(self.find(self._keys[used]), used):
            raise InvariantError("an entry of the table is not found, or found elsewhere")
        if np.any(self._numbers[self._keys == 0]):
            raise InvariantError("a free slot of the table has a number")
