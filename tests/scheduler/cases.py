"""Small clusters to schedule on: refs, messages and a Conductor that keeps the time."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from core.config import ConductorConfig
from core.ids import Address, AttemptId, BlockHash, Incarnation, PoolRef, RequestId, WorkerRef
from core.latency import LatencyProfile
from core.messages.to_conductor import (
    AttemptEnded,
    DecodeLoad,
    Placement,
    PlaceRequest,
    PoolSnapshot,
    PrefillEnded,
    PrefillLoad,
    RegisterPoolNode,
    RegisterWorker,
    Rejection,
    WorkerCapacity,
    WorkerReport,
    WorkerRole,
)
from core.messages.to_pool import Tier
from scheduler.conductor import Conductor
from scheduler.events import (
    Action,
    AttemptReported,
    Event,
    Place,
    PlacementRequested,
    PoolNodeRegistered,
    PoolSnapshotReceived,
    PrefillReported,
    Reject,
    WorkerRegistered,
    WorkerReported,
)

GATEWAY = Incarnation("gateway-1")

MS_PER_TOKEN = LatencyProfile("1 ms a token", 0.0, 1.0, 0.0, 10.0, 1.0, 0.01)
"""Prefill 1 ms a token; a decode step 10 ms + 1 ms a sequence + 0.01 ms a context token."""


def pool_ref(name: str, life: int = 1) -> PoolRef:
    return PoolRef(name, Incarnation(f"{name}-{life}"), Address("127.0.0.1", 1))


def worker_ref(name: str, pool: PoolRef, life: int = 1) -> WorkerRef:
    return WorkerRef(name, Incarnation(f"{name}-{life}"), Address("127.0.0.1", 2), pool)


def attempt(counter: int, number: int = 1, gateway: Incarnation = GATEWAY) -> AttemptId:
    return AttemptId(RequestId(gateway, counter), number)


def hashes(count: int, family: int = 0) -> list[BlockHash]:
    """Real ones: the directory takes any 64 bits of a hash for its own."""
    return [
        BlockHash(blake2b(struct.pack("<II", family, i), digest_size=32).digest())
        for i in range(count)
    ]


def place_request(
    counter: int,
    num_tokens: int,
    *,
    number: int = 1,
    blocks: Sequence[BlockHash] = (),
    num_new_tokens: int = 20,
    needs_decode: bool = True,
    excluded: tuple[Incarnation, ...] = (),
    gateway: Incarnation = GATEWAY,
) -> PlaceRequest:
    return PlaceRequest(
        attempt=attempt(counter, number, gateway),
        num_tokens=num_tokens,
        num_new_tokens=num_new_tokens,
        block_hashes=b"".join(blocks),
        needs_decode=needs_decode,
        priority=0,
        excluded=excluded,
    )


IDLE = WorkerReport(PrefillLoad(0, 0, 0, 1000), DecodeLoad(0, 0, 0, 1000, 0.0), False)


def report(*, draining: bool = False, free_blocks: int = 1000, running: int = 0) -> WorkerReport:
    return WorkerReport(None, DecodeLoad(0, running, 0, free_blocks, 0.0), draining)


class Cluster:
    """A Conductor with blocks of 10 tokens and 1000 bytes, links of 10,000 bytes a second."""

    def __init__(self, epoch: int = 1, **config) -> None:
        defaults = {"block_size": 10, "block_bytes": 1000, "link_bytes_per_s": 10_000.0}
        self.conductor = Conductor(ConductorConfig(**{**defaults, **config}), epoch)
        self.now_s = 100.0
        self.events: list[Event] = []
        self.actions: list[list[Action]] = []

    def handle(self, event: Event) -> list[Action]:
        actions = self.conductor.handle(event)
        self.conductor.validate()
        self.events.append(event)
        self.actions.append(actions)
        return actions

    def add_pool(self, name: str, life: int = 1) -> PoolRef:
        ref = pool_ref(name, life)
        self.handle(PoolNodeRegistered(self.now_s, 0, RegisterPoolNode(ref, 100, 1000)))
        return ref

    def add_worker(
        self,
        name: str,
        role: str,
        pool: PoolRef,
        *,
        life: int = 1,
        attempts: tuple[AttemptId, ...] = (),
        num_blocks: int = 1000,
        max_batch: int = 8,
        profile: LatencyProfile | None = MS_PER_TOKEN,
    ) -> WorkerRef:
        ref = worker_ref(name, pool, life)
        capacity = WorkerCapacity(num_blocks, 10, max_batch, 512)
        message = RegisterWorker(WorkerRole(role), ref, capacity, attempts, profile)
        self.handle(WorkerRegistered(self.now_s, 0, message))
        return ref

    def hold(self, pool: PoolRef, blocks: Sequence[BlockHash], seq: int = 1) -> None:
        part = PoolSnapshot(seq, Tier.DRAM, b"".join(blocks), last=True)
        self.handle(PoolSnapshotReceived(self.now_s, pool.incarnation, part))

    def report(self, ref: WorkerRef, load: WorkerReport) -> None:
        self.handle(WorkerReported(self.now_s, ref.incarnation, load))

    def ask(self, counter: int, num_tokens: int, **request) -> Placement | Rejection:
        event = PlacementRequested(
            self.now_s, counter, place_request(counter, num_tokens, **request)
        )
        (action,) = self.handle(event)
        assert isinstance(action, Place | Reject)
        assert action.correlation == counter
        return action.placement if isinstance(action, Place) else action.rejection

    def place(self, counter: int, num_tokens: int, **request) -> Placement:
        answer = self.ask(counter, num_tokens, **request)
        assert isinstance(answer, Placement), answer
        return answer

    def prefill_name(self, counter: int, num_tokens: int, **request) -> str:
        placement = self.place(counter, num_tokens, **request)
        assert placement.prefill is not None
        return placement.prefill.name

    def end_prefill(self, counter: int, number: int = 1, seconds: float = 0.1) -> None:
        ended = PrefillEnded(attempt(counter, number), 100, 0, 0.0, seconds)
        self.handle(PrefillReported(self.now_s, ended))

    def end(self, counter: int, number: int = 1, num_output_tokens: int = 0) -> None:
        ended = AttemptEnded(attempt(counter, number), num_output_tokens)
        self.handle(AttemptReported(self.now_s, ended))


def two_by_two(**config) -> Cluster:
    """Two hosts, each with a prefill and a decode worker and a pool node."""
    cluster = Cluster(**config)
    for host in (0, 1):
        pool = cluster.add_pool(f"pool-{host}")
        cluster.hold(pool, [], seq=0)
        cluster.add_worker(f"prefill-{host}", "prefill", pool)
        cluster.add_worker(f"decode-{host}", "decode", pool)
    return cluster
