"""Derives every count of the disk tier afresh, for tests."""

from __future__ import annotations

from core.errors import InvariantError
from core.ids import BlockHash
from kvpool.disk.state import DiskState


def check_disk(state: DiskState) -> None:
    """Raise `InvariantError` when what must agree does not, or when the size bound is passed."""
    extents = state.extents
    if extents.num_bytes > state.max_bytes:
        raise InvariantError(f"{extents.num_bytes} bytes are above {state.max_bytes}")
    if sum(e.num_bytes for e in extents) != extents.num_bytes:
        raise InvariantError("the bytes of the extents do not add up")
    alive: set[BlockHash] = set()
    for extent in extents:
        entries = [e for e in extent.entries if e is not None]
        counted = (sum(e.is_alive for e in entries), sum(e.is_pending for e in entries))
        if counted != (extent.num_alive, extent.num_pending):
            raise InvariantError(f"extent {extent.number} has {counted} live and pending records")
        if len(extent.entries) > extent.capacity or (extent.is_leaving and extent is extents.head):
            raise InvariantError(f"extent {extent.number} takes records that it must not")
        found = {e.record.key for e in extent.alive()}
        if len(found) != extent.num_alive or found & alive:
            raise InvariantError(f"extent {extent.number} has a second live record of a key")
        alive |= found
    if alive != set(state.keys()):
        raise InvariantError("the index and the extents do not agree on what is alive")
