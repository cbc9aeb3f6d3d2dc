"""Steps of a coupled worker: decode tokens first, then pieces of prompts. Pure.

This is the honest baseline to separate workers: one engine does both, so each chunk delays the
tokens of every running sequence. The prompts' batcher is handed in as a `core` Protocol.
"""

from __future__ import annotations

from core.batching import ChunkBatcher, Piece
from core.ids import AttemptId


class MixedBatcher:
    """Fills each step up to `max_chunk_tokens` with pieces, beside the decode tokens.

    However many sequences decode, a block's worth of prompt tokens goes along, so that prompts
    are never starved.
    """

    def __init__(self, chunks: ChunkBatcher, *, max_chunk_tokens: int, block_size: int) -> None:
        self._chunks = chunks
        self._max_chunk_tokens = max_chunk_tokens
        self._block_size = block_size

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not yet handed out."""
        return self._chunks.queued_tokens

    def add(self, attempt: AttemptId, *, start: int, end: int, priority: int) -> None:
        """Queue the positions `start ... end - 1` of a loaded attempt."""
        self._chunks.add(attempt, start=start, end=end, priority=priority)

    def remove(self, attempt: AttemptId) -> None:
        """Forget an attempt; no error when it is not queued."""
        self._chunks.remove(attempt)

    def next_pieces(self, num_decodes: int) -> tuple[Piece, ...]:
        """Return what to compute beside `num_decodes` decode tokens."""
        return self._chunks.next_chunk(max(self._block_size, self._max_chunk_tokens - num_decodes))
