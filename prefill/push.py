"""The blocks of one attempt on their way into slots of one pool node. Pure.

Life of a slot: named → begun (the pool node knows that we write) → written, layer by layer as the
layers are computed → committed. One operation runs at a time for each attempt and pool node, so
what comes up meanwhile goes with the next one: many layers in one when the link is slow, each
layer at once when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from core.errors import InvariantError
from core.ids import AttemptId, PoolRef, SlotHandle
from prefill.events import BeginWrites, CommitBlocks, EndWrites, LayerSlices, WriteBlocks

MAX_SLICES = 256
"""Slices in one operation; bounds how long a cancelled attempt keeps its blocks."""

MAX_TRIES = 4
"""Of a `BeginWrites`; they are a report interval apart."""

Operation = BeginWrites | WriteBlocks | CommitBlocks
_Kind = TypeVar("_Kind", BeginWrites, WriteBlocks, CommitBlocks)


@dataclass(slots=True)
class _Slot:
    """Block number `index` of the request goes into `handle`; layers below `num_layers` went."""

    index: int
    handle: SlotHandle
    begun: bool = False
    num_tries: int = 0
    num_layers: int = 0


class Push:
    """Slots of `pool` that wait for blocks of `attempt`."""

    def __init__(self, attempt: AttemptId, pool: PoolRef, num_layers: int) -> None:
        self.pool = pool
        self._attempt = attempt
        self._num_layers = num_layers
        self._slots: dict[SlotHandle, _Slot] = {}
        self._seen: set[SlotHandle] = set()
        self.closed = False
        self._running: Operation | None = None
        self._paused = False

    @property
    def busy(self) -> bool:
        """Whether an operation runs: slots, and the blocks it reads, are in use."""
        return self._running is not None

    @property
    def done(self) -> bool:
        """Whether nothing is left to write and nothing runs."""
        return not self._slots and not self.busy

    def add(self, slots: Sequence[tuple[int, SlotHandle]]) -> None:
        """Take (block index, handle) pairs; those seen before are repeated messages."""
        for index, handle in slots:
            if handle not in self._seen and not self.closed:
                self._seen.add(handle)
                self._slots[handle] = _Slot(index, handle)

    def next_operation(
        self, num_ready: Callable[[int], int], block_ids: Sequence[int]
    ) -> Operation | None:
        """Start what can be done now, if nothing runs.

        `num_ready(index)` counts the layers of a block that are complete in the paged cache.
        """
        if self.busy or self.closed or self._paused:
            return None
        slots = self._slots.values()
        named = tuple(slot.handle for slot in slots if not slot.begun)
        written = tuple(slot.handle for slot in slots if slot.num_layers == self._num_layers)
        if named:
            self._running = BeginWrites(self._attempt, self.pool, named)
        elif written:
            self._running = CommitBlocks(self._attempt, self.pool, written)
        else:
            slices = self._slices(num_ready, block_ids)
            self._running = WriteBlocks(self._attempt, self.pool, slices) if slices else None
        return self._running

    def _slices(
        self, num_ready: Callable[[int], int], block_ids: Sequence[int]
    ) -> tuple[LayerSlices, ...]:
        """Everything that is ready, lowest layer first, up to `MAX_SLICES`."""
        ready = [(slot, num_ready(slot.index)) for slot in self._slots.values()]
        slices: list[LayerSlices] = []
        room = MAX_SLICES
        for layer in range(self._num_layers):
            due = [slot for slot, count in ready if slot.num_layers <= layer < count][:room]
            if due:
                slices.append(
                    LayerSlices(
                        layer,
                        tuple(block_ids[slot.index] for slot in due),
                        tuple(slot.handle for slot in due),
                    )
                )
            room -= len(due)
            if room == 0:
                break
        return tuple(slices)

    def begun(self, accepted: Sequence[bool]) -> None:
        """End a `BeginWrites`; slots that were refused are forgotten."""
        operation = self._ended(BeginWrites)
        for handle, ok in zip(operation.handles, accepted, strict=True):
            if ok:
                self._slots[handle].begun = True
            else:
                del self._slots[handle]

    def written(self) -> None:
        """End a `WriteBlocks`."""
        for part in self._ended(WriteBlocks).slices:
            for handle in part.handles:
                self._slots[handle].num_layers = part.layer + 1

    def committed(self) -> None:
        """End a `CommitBlocks`. A refused slot is its owner's to replace."""
        for handle in self._ended(CommitBlocks).handles:
            del self._slots[handle]

    def failed(self) -> None:
        """End whatever runs: the connection to the pool node is gone, the node perhaps not.

        A living node tells the owner of slots that were begun. Of those still to be begun it
        knows no writer, so they are tried again, a little later, up to `MAX_TRIES` times.
        """
        running, self._running = self._running, None
        for handle in running.handles if isinstance(running, BeginWrites) else ():
            self._slots[handle].num_tries += 1
        self._slots = {
            handle: slot
            for handle, slot in self._slots.items()
            if not slot.begun and slot.num_tries < MAX_TRIES
        }
        self._paused = True

    def resume(self) -> None:
        """Let a push that failed go on."""
        self._paused = False

    def close(self) -> EndWrites | None:
        """Write nothing more. Call it again when `busy` ended: only then slots can be let go."""
        self.closed = True
        if self.busy:
            return None
        begun = tuple(slot.handle for slot in self._slots.values() if slot.begun)
        self._slots.clear()
        return EndWrites(self.pool, begun) if begun else None

    def _ended(self, kind: type[_Kind]) -> _Kind:
        operation = self._running
        if not isinstance(operation, kind):
            raise InvariantError(f"{self._attempt}: {kind.__name__} ended, {operation} runs")
        self._running = None
        return operation
