"""The chunk that runs, and what comes after it. Pure."""

from __future__ import annotations

from collections import deque

from core.batching import Piece
from core.ids import AttemptId
from prefill.attempt import Attempt
from prefill.batcher import PrefillBatcher


class Chunks:
    """At most one chunk runs. When one of several pieces failed, each is tried alone."""

    def __init__(self, batcher: PrefillBatcher, *, max_tokens: int) -> None:
        self.running: tuple[Piece, ...] = ()
        self.layers_done = 0
        self._batcher = batcher
        self._max_tokens = max_tokens
        self._alone: deque[Piece] = deque()

    @property
    def attempts(self) -> set[AttemptId]:
        """Everybody who has something left to compute, the running chunk included."""
        pieces = {piece.attempt for piece in (*self.running, *self._alone)}
        return pieces | self._batcher.attempts

    def add(self, attempt: Attempt) -> None:
        """Queue what is not computed of an attempt."""
        self._batcher.add(
            attempt.attempt,
            start=attempt.num_computed,
            end=attempt.num_tokens,
            priority=attempt.work.priority,
        )

    def remove(self, name: AttemptId) -> None:
        """Compute nothing more of an attempt; its running piece is not touched."""
        self._batcher.remove(name)
        self._alone = deque(piece for piece in self._alone if piece.attempt != name)

    def start(self) -> tuple[Piece, ...]:
        """Begin the next chunk, if none runs; return its pieces."""
        if self.running:
            return ()
        if self._alone:
            self.running = (self._alone.popleft(),)
        else:
            self.running = self._batcher.next_chunk(self._max_tokens)
        self.layers_done = 0
        return self.running

    def end(self) -> tuple[Piece, ...]:
        """End the running chunk; return its pieces."""
        pieces, self.running = self.running, ()
        return pieces

    def repeat_alone(self, piece: Piece) -> None:
        """Compute a piece again, in a chunk of its own, before anything else."""
        self._alone.append(piece)
