"""Block hashes: a BLAKE2b chain that is the same in every process and on every host.

`hash(block) = BLAKE2b-256(parent hash || token ids as little-endian u32)`. The first parent is the
root, which covers everything that changes what the KV bytes mean. Golden vectors pin both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from core.ids import BLOCK_HASH_BYTES, BlockHash

_ONE_HASH = struct.Struct(f"{BLOCK_HASH_BYTES}s")


@dataclass(frozen=True, slots=True)
class HashRoot:
    """All that KV bytes depend on besides the tokens.

    `model` and `tokenizer` are hex digests (configuration and weights; tokenizer files), `layout`
    names the byte order of a block, `salt` separates tenants.
    """

    model: str
    tokenizer: str
    kv_dtype: str
    layout: str
    block_size: int
    salt: str = ""

    def digest(self) -> BlockHash:
        """Return the parent of every first block under this root."""
        h = blake2b(digest_size=BLOCK_HASH_BYTES, person=b"halfmoon-root-1")
        for part in (self.model, self.tokenizer, self.kv_dtype, self.layout, self.salt):
            raw = part.encode()
            h.update(struct.pack("<I", len(raw)) + raw)
        h.update(struct.pack("<I", self.block_size))
        return BlockHash(h.digest())


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32. Raises `struct.error` for an id outside u32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_token_ids(raw: bytes) -> tuple[int, ...]:
    """Undo `pack_token_ids`. Raises `ValueError` when `raw` is not a whole number of ids."""
    if len(raw) % 4:
        raise ValueError(f"token ids take 4 bytes each; got {len(raw)} bytes")
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def extend_block_hashes(
    parent: BlockHash, token_ids: Sequence[int], block_size: int
) -> list[BlockHash]:
    """Hash every *full* block of `token_ids`, which follow the block `parent`."""
    packed = pack_token_ids(token_ids[: len(token_ids) // block_size * block_size])
    step = 4 * block_size
    hashes: list[BlockHash] = []
    for start in range(0, len(packed), step):
        digest = blake2b(parent + packed[start : start + step], digest_size=BLOCK_HASH_BYTES)
        parent = BlockHash(digest.digest())
        hashes.append(parent)
    return hashes


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Concatenate hashes for the wire."""
    return b"".join(hashes)


def split_hashes(raw: bytes) -> list[BlockHash]:
    """Undo `join_hashes`. Raises `ValueError` when `raw` is not a whole number of hashes."""
    if len(raw) % BLOCK_HASH_BYTES:
        raise ValueError(f"block hashes take {BLOCK_HASH_BYTES} bytes each; got {len(raw)} bytes")
    return [block_hash for (block_hash,) in _ONE_HASH.iter_unpack(raw)]
