"""Random but sensible histories of a cluster, drawn from a `Random`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from core.ids import AttemptId, BlockHash, Incarnation
from core.latency import LatencyProfile
from core.messages.to_conductor import (
    AttemptEnded,
    DecodeLoad,
    LinkSample,
    PoolEvents,
    PoolReport,
    PoolSnapshot,
    PrefillEnded,
    PrefillLoad,
    RegisterGateway,
    WorkerReport,
)
from core.messages.to_pool import Tier
from scheduler.events import (
    AttemptReported,
    GatewayRegistered,
    PeerLost,
    PlacementRequested,
    PoolEventsReceived,
    PoolReported,
    PoolSnapshotReceived,
    PrefillReported,
    Ticked,
    WorkerReported,
)
from tests.scheduler.cases import (
    MS_PER_TOKEN,
    Cluster,
    attempt,
    hashes,
    place_request,
    pool_ref,
    worker_ref,
)

ROLES = ("prefill", "decode", "coupled")
HOSTS = 3
LIVES = 3
FAMILIES = [hashes(12, family) for family in range(3)]


class Story:
    """Does one random thing to a cluster at a time: good, late, repeated, or from a stranger."""

    def __init__(self, rng: Random, cluster: Cluster) -> None:
        self.rng = rng
        self.cluster = cluster
        self.num_deeds = 0
        self.deeds: list[Callable[[], object]] = [
            self.register_worker,
            self.register_pool,
            self.register_gateway,
            self.lose_peer,
            self.tick,
            *[self.report_worker] * 3,
            *[self.report_pool] * 2,
            *[self.change_pool] * 3,
            self.snapshot_pool,
            *[self.ask] * 8,
            *[self.end_prefill] * 4,
            *[self.end_attempt] * 3,
        ]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.cluster.now_s += self.rng.choice((0.0, 0.01, 0.2, 0.9))
            self.rng.choice(self.deeds)()
            self.num_deeds += 1

    def host(self) -> int:
        return self.rng.randrange(HOSTS)

    def attempt(self) -> AttemptId:
        gateway = Incarnation(f"gateway-{self.rng.randrange(2)}")
        # A window that moves on: what ended never comes back.
        counter = self.num_deeds // 20 + self.rng.randrange(30)
        return attempt(counter, self.rng.randrange(1, 4), gateway)

    def pool(self) -> Incarnation:
        return pool_ref(f"pool-{self.host()}", self.rng.randrange(1, LIVES + 1)).incarnation

    def worker(self) -> Incarnation:
        pool = pool_ref("any")
        life = self.rng.randrange(1, LIVES + 1)
        return worker_ref(f"{self.rng.choice(ROLES)}-{self.host()}", pool, life).incarnation

    def blocks(self) -> list[BlockHash]:
        return self.rng.choice(FAMILIES)[: self.rng.randrange(13)]

    def register_worker(self) -> None:
        host, role = self.host(), self.rng.choice(ROLES)
        profiles: tuple[LatencyProfile | None, ...] = (MS_PER_TOKEN, None)
        self.cluster.add_worker(
            f"{role}-{host}",
            role,
            pool_ref(f"pool-{host}", self.rng.randrange(1, LIVES + 1)),
            life=self.rng.randrange(1, LIVES + 1),
            attempts=tuple(self.attempt() for _ in range(self.rng.randrange(3))),
            num_blocks=self.rng.choice((5, 100)),
            profile=self.rng.choice(profiles),
        )

    def register_pool(self) -> None:
        self.cluster.add_pool(f"pool-{self.host()}", self.rng.randrange(1, LIVES + 1))

    def register_gateway(self) -> None:
        name = f"gateway-{self.rng.randrange(2)}"
        message = RegisterGateway(name, Incarnation(name), pool_ref("x").address)
        self.cluster.handle(GatewayRegistered(self.cluster.now_s, 1, message))

    def lose_peer(self) -> None:
        gateway = Incarnation(f"gateway-{self.rng.randrange(2)}")
        lost = self.rng.choice((self.pool(), self.worker(), gateway))
        self.cluster.handle(PeerLost(self.cluster.now_s, lost))

    def tick(self) -> None:
        self.cluster.handle(Ticked(self.cluster.now_s))

    def report_worker(self) -> None:
        busy = self.rng.randrange(3)
        prefill = PrefillLoad(busy, busy, busy * 500, self.rng.randrange(100))
        decode = DecodeLoad(0, busy, busy * 700, self.rng.randrange(100), self.rng.random() / 10)
        report = WorkerReport(
            self.rng.choice((prefill, None)),
            self.rng.choice((decode, None)),
            self.rng.random() < 0.1,
        )
        self.cluster.handle(WorkerReported(self.cluster.now_s, self.worker(), report))

    def report_pool(self) -> None:
        sample = LinkSample(self.pool(), self.rng.randrange(10**7), self.rng.random())
        report = PoolReport(1, 2, 3, 4, 5, (sample,))
        self.cluster.handle(PoolReported(self.cluster.now_s, self.pool(), report))

    def change_pool(self) -> None:
        added, removed = self.rng.sample(FAMILIES, 2)
        batch = PoolEvents(
            self.rng.randrange(1, 6),
            self.rng.choice(list(Tier)),
            b"".join(added[: self.rng.randrange(13)]),
            b"".join(removed[: self.rng.randrange(13)]),
        )
        self.cluster.handle(PoolEventsReceived(self.cluster.now_s, self.pool(), batch))

    def snapshot_pool(self) -> None:
        part = PoolSnapshot(
            self.rng.randrange(1, 6),
            self.rng.choice(list(Tier)),
            b"".join(self.blocks()),
            self.rng.random() < 0.8,
        )
        self.cluster.handle(PoolSnapshotReceived(self.cluster.now_s, self.pool(), part))

    def ask(self) -> None:
        named = self.attempt()
        blocks = self.blocks()
        request = place_request(
            named.request.counter,
            10 * len(blocks) + self.rng.randrange(1, 10),
            number=named.attempt,
            blocks=blocks,
            num_new_tokens=self.rng.randrange(200),
            needs_decode=self.rng.random() < 0.9,
            excluded=tuple(self.worker() for _ in range(self.rng.randrange(3))),
            gateway=named.request.gateway,
        )
        self.cluster.handle(PlacementRequested(self.cluster.now_s, 7, request))

    def end_prefill(self) -> None:
        ended = PrefillEnded(self.attempt(), 100, 20, 0.1, self.rng.random())
        self.cluster.handle(PrefillReported(self.cluster.now_s, ended))

    def end_attempt(self) -> None:
        ended = AttemptEnded(self.attempt(), self.rng.randrange(300))
        self.cluster.handle(AttemptReported(self.cluster.now_s, ended))
