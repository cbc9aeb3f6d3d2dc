"""Identifiers: who made a thing, which life of that maker it belongs to, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Incarnation = NewType("Incarnation", str)
"""Random 16 hex digits made when a process starts. Two lives of one worker never share it."""

BlockHash = NewType("BlockHash", bytes)
"""32-byte chained hash of a full block of tokens; see `core.hashing`."""

BLOCK_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, order=True)
class RequestId:
    """Made by the gateway that owns the request; unique over all gateways and their lives."""

    gateway: Incarnation
    counter: int

    def __str__(self) -> str:
        return f"{self.gateway}-{self.counter}"


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One try at a request. `attempt` starts at 1; a message of an older attempt is dropped."""

    request: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP endpoint that a process listens on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PoolRef:
    """One life of a pool node and where it listens for other hosts."""

    name: str
    incarnation: Incarnation
    address: Address


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One life of a worker, where it listens, and the pool node of its host."""

    name: str
    incarnation: Incarnation
    address: Address
    pool: PoolRef


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """Names a slot of a pool node: never an address. A stale handle is refused by its owner.

    `incarnation` is the pool node's life; `generation` counts the uses of this slot.
    """

    segment: int
    slot: int
    incarnation: Incarnation
    generation: int
