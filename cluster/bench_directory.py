"""`halfmoon bench directory`: the Conductor's directory at scale, and a lease at a pool node.

The blocks are chains of 16 to 512, as prompts make them. Each chain is at one node, and with
chance 1/11 at one more, again and again: 1.1 replicas on average. Nothing goes over a network; the
figures are wall-clock times of `Directory.apply`, `match` and `drop`, of the codec and of
`PoolNodeState.handle`, with the making of the hashes left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import psutil
from rich.progress import Progress

from cluster.figures import Figure, Report, add_output_arguments
from core.config import PoolNodeConfig
from core.ids import BLOCK_HASH_BYTES, Address, AttemptId, Incarnation, PoolRef, RequestId
from core.messages import to_pool
from core.messages.to_conductor import PoolEvents, PoolSnapshot
from core.messages.to_pool import (
    BeginWrites,
    BlocksLeased,
    BlocksReserved,
    BlockWritten,
    CloseTransfer,
    CommitBlocks,
    LeaseBlocks,
    ReserveBlocks,
    SlotReserved,
    Tier,
)
from core.wire import Message
from kvpool.checksum import CHECKSUM_BYTES
from kvpool.directory import Directory
from kvpool.events import BlocksVerified, Reply, Requested, Told, VerifyBlocks
from kvpool.records import LinkId
from kvpool.state import HASHES_PER_MESSAGE, PoolNodeState

BATCHES = (256, 512, 1024, 2048, 4096)
"""Hashes in an event batch, in turn; half of them added and half removed."""

CHAIN_BLOCKS = (16, 512)
MORE_REPLICAS = 1 / 11
MATCH_BLOCKS = 512
SNAPSHOT_BLOCKS = 156_000
TTL_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add = parser.add_argument
    add("--blocks", type=int, default=10_000_000, help="different blocks (10,000,000)")
    add("--nodes", type=int, default=64, help="pool nodes (64)")
    add("--updates", type=int, default=3_000_000, help="hashes added and removed after (3,000,000)")
    add("--rounds", type=int, default=200, help="times a match and a lease are measured (200)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Fill a directory, keep it changing, and measure; then the way to a lease."""
    report = Report(f"bench directory: {args.blocks} blocks over {args.nodes} pool nodes")
    with Progress() as progress:
        fleet = _Fleet(args.nodes)
        before = psutil.Process().memory_info().rss
        _fill(fleet, args.blocks, progress)
        grown = psutil.Process().memory_info().rss - before
        num_blocks, num_entries = fleet.directory.num_blocks, fleet.num_entries
        report.figures += [
            Figure("memory per block and holder", grown / num_entries, "bytes", at_most=150),
            Figure("memory per block", grown / num_blocks, "bytes"),
        ]
        report.notes.append(f"{num_entries / num_blocks:.3f} replicas of a block on average")
        report.figures += _change(fleet, args.updates, progress)
        report.figures += _match_and_lease(fleet, args.rounds, progress)
        report.figures += _snapshot_and_drop(fleet)
    return report


# --- the pool nodes -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """What a pool node published: numbers of chains, the oldest first."""

    ref: PoolRef
    chains: deque[int] = field(default_factory=deque)
    seq: int = 0


class _Fleet:
    """Pool nodes that publish chains to a directory, and the time that took in each `apply`."""

    def __init__(self, num_nodes: int) -> None:
        self.directory = Directory()
        self.nodes = [
            _Node(PoolRef(f"pool-{i}", Incarnation(f"{i:016x}"), Address("127.0.0.1", i + 1)))
            for i in range(num_nodes)
        ]
        self.num_entries = 0
        self.num_chains = 0
        self._chance = random.Random(0)
        for node in self.nodes:
            self.directory.add(node.ref)
            self.publish(node, PoolSnapshot(0, Tier.DRAM, b"", last=True))

    def publish(self, node: _Node, message: PoolEvents | PoolSnapshot) -> float:
        """Apply a message; return how long that took, in seconds."""
        start_s = time.perf_counter()
        self.directory.apply(node.ref.incarnation, message)
        return time.perf_counter() - start_s

    def batch(self, node: _Node, added: bytes, removed: bytes) -> PoolEvents:
        """Make the node's next batch of events."""
        node.seq += 1
        self.num_entries += (len(added) - len(removed)) // BLOCK_HASH_BYTES
        return PoolEvents(node.seq, Tier.DRAM, added, removed)

    def new_chain(self) -> tuple[bytes, list[_Node]]:
        """Return the hashes of another chain and the nodes that hold it from now on."""
        number, self.num_chains = self.num_chains, self.num_chains + 1
        holders = [self._chance.choice(self.nodes)]
        while self._chance.random() < MORE_REPLICAS:
            holders.append(self._chance.choice(self.nodes))
        different = list({node.ref.name: node for node in holders}.values())
        for node in different:
            node.chains.append(number)
        return chain_hashes(number), different


def chain_hashes(number: int) -> bytes:
    """Return the joined hashes of a chain: the same for the same number, and of varied length."""
    chance = np.random.Generator(np.random.Philox(key=number))
    return chance.bytes(int(chance.integers(*CHAIN_BLOCKS)) * BLOCK_HASH_BYTES)


def _fill(fleet: _Fleet, num_blocks: int, progress: Progress) -> None:
    task = progress.add_task("fill", total=num_blocks)
    num_made = 0
    pending: dict[str, list[bytes]] = {node.ref.name: [] for node in fleet.nodes}
    while num_made < num_blocks:
        hashes, holders = fleet.new_chain()
        num_made += len(hashes) // BLOCK_HASH_BYTES
        for node in holders:
            waiting = pending[node.ref.name]
            waiting.append(hashes)
            if len(waiting) >= 8:
                fleet.publish(node, fleet.batch(node, b"".join(waiting), b""))
                waiting.clear()
        progress.update(task, completed=num_made)
    for node in fleet.nodes:
        fleet.publish(node, fleet.batch(node, b"".join(pending[node.ref.name]), b""))


def _change(fleet: _Fleet, num_updates: int, progress: Progress) -> list[Figure]:
    """Each node loses its oldest chains and gains as many new blocks."""
    task = progress.add_task("change", total=num_updates)
    sizes: list[int] = []
    times_s: list[float] = []
    gained: dict[str, bytes] = {node.ref.name: b"" for node in fleet.nodes}
    lost = dict(gained)
    while sum(sizes) < num_updates:
        node = fleet.nodes[len(sizes) % len(fleet.nodes)]
        name = node.ref.name
        half = BATCHES[len(sizes) % len(BATCHES)] // 2 * BLOCK_HASH_BYTES
        while len(gained[name]) < half:
            hashes, holders = fleet.new_chain()
            for holder in holders:
                gained[holder.ref.name] += hashes
        while len(lost[name]) < half:
            lost[name] += chain_hashes(node.chains.popleft())
        batch = fleet.batch(node, gained[name][:half], lost[name][:half])
        gained[name], lost[name] = gained[name][half:], lost[name][half:]
        times_s.append(fleet.publish(node, batch))
        sizes.append(2 * half // BLOCK_HASH_BYTES)
        progress.update(task, completed=sum(sizes))
    return [
        Figure("updates applied", sum(sizes) / sum(times_s), "hashes/s", at_least=500_000),
        Figure("longest apply of a batch", 1e3 * max(times_s), "ms"),
    ]


# --- matches and leases -------------------------------------------------------------------------


def _match_and_lease(fleet: _Fleet, rounds: int, progress: Progress) -> list[Figure]:
    """Match a prefix that every node holds a part of, and lease it at a pool node."""
    task = progress.add_task("match and lease", total=rounds)
    chance = np.random.Generator(np.random.Philox(key=2**64 - 1))
    prompt_bytes = MATCH_BLOCKS * BLOCK_HASH_BYTES
    prompts = [chance.bytes(prompt_bytes) for _ in range(min(rounds, 32))]
    for index, node in enumerate(fleet.nodes):
        share = -(-MATCH_BLOCKS * (index + 1) // len(fleet.nodes)) * BLOCK_HASH_BYTES
        held = b"".join(prompt[:share] for prompt in prompts)
        fleet.publish(node, fleet.batch(node, held, b""))
    state = _pool_with(prompts)
    match_s: list[float] = []
    whole_s: list[float] = []
    for number in range(rounds):
        prompt = prompts[number % len(prompts)]
        start_s = time.perf_counter()
        found = fleet.directory.match(prompt)
        match_s.append(time.perf_counter() - start_s)
        whole_s.append(match_s[-1] + _lease(state, prompt, number + 1))
        if len(found) != len(fleet.nodes) or max(found.values()) != MATCH_BLOCKS:
            raise AssertionError("the directory lost a block")
        progress.advance(task)
    return [
        Figure(f"match of {MATCH_BLOCKS} blocks, p50", 1e3 * statistics.median(match_s), "ms",
               at_most=0.2),
        Figure(f"match and lease of {MATCH_BLOCKS} blocks, p50",
               1e3 * statistics.median(whole_s), "ms", at_most=0.5),
    ]  # fmt: skip


def _pool_with(prompts: list[bytes]) -> PoolNodeState:
    """Return a pool node that holds the prompts' blocks, of 8 bytes each."""
    config = PoolNodeConfig(
        num_slots=len(prompts) * MATCH_BLOCKS, slot_bytes=CHECKSUM_BYTES, num_layers=1
    )
    state = PoolNodeState(config, PoolRef("pool", Incarnation("0" * 16), Address("127.0.0.1", 1)))
    link, transfer = LinkId(1), _attempt(0)
    for prompt in prompts:
        reserved = _reply(state, link, ReserveBlocks(transfer, prompt, 0, TTL_S))
        assert isinstance(reserved, BlocksReserved)
        handles = tuple(o.handle for o in reserved.outcomes if isinstance(o, SlotReserved))
        _reply(state, link, BeginWrites(handles))
        written = tuple(BlockWritten(handle, bytes(CHECKSUM_BYTES)) for handle in handles)
        for action in state.handle(Requested(0.0, link, 0, CommitBlocks(written))):
            assert isinstance(action, VerifyBlocks)
            state.handle(BlocksVerified(0.0, action.verification, (True,) * len(action.blocks)))
    state.handle(Told(0.0, link, CloseTransfer(transfer)))
    return state


def _lease(state: PoolNodeState, prompt: bytes, number: int) -> float:
    """Lease a prompt's blocks as a worker does; return the seconds that it took."""
    start_s = time.perf_counter()
    asked = to_pool.MESSAGES.decode(
        to_pool.MESSAGES.encode(LeaseBlocks(_attempt(number), prompt, TTL_S))
    )
    answer = to_pool.REPLIES.decode(to_pool.REPLIES.encode(_reply(state, LinkId(1), asked)))
    took_s = time.perf_counter() - start_s
    if not isinstance(answer, BlocksLeased) or answer.num_blocks != MATCH_BLOCKS:
        raise AssertionError("the pool node lost a block")
    state.handle(Told(0.0, LinkId(1), CloseTransfer(_attempt(number))))
    return took_s


def _reply(state: PoolNodeState, link: LinkId, message: Message) -> Message:
    (action,) = state.handle(Requested(0.0, link, 0, message))
    assert isinstance(action, Reply)
    return action.message


def _attempt(number: int) -> AttemptId:
    return AttemptId(RequestId(Incarnation("f" * 16), number), 1)


# --- snapshots and losses -----------------------------------------------------------------------


def _snapshot_and_drop(fleet: _Fleet) -> list[Figure]:
    """Repair a gap of the first node by a snapshot, lose the second, and go on until swept."""
    first, second, third = fleet.nodes[0], fleet.nodes[1], fleet.nodes[2]
    hashes = b"".join(map(chain_hashes, first.chains))[: SNAPSHOT_BLOCKS * BLOCK_HASH_BYTES]
    step = HASHES_PER_MESSAGE * BLOCK_HASH_BYTES
    parts = [hashes[at : at + step] for at in range(0, len(hashes), step)]
    part_s = [
        fleet.publish(first, PoolSnapshot(first.seq, Tier.DRAM, part, last=part is parts[-1]))
        for part in parts
    ]
    start_s = time.perf_counter()
    fleet.directory.drop(second.ref.incarnation)
    drop_s = time.perf_counter() - start_s
    num_blocks = len(hashes) // BLOCK_HASH_BYTES
    after_s = [fleet.publish(third, fleet.batch(third, b"", b"")) for _ in range(1000)]
    return [
        Figure(f"snapshot of {num_blocks} blocks, longest call", 1e3 * max(part_s), "ms",
               at_most=100),
        Figure(f"snapshot of {num_blocks} blocks, all calls", 1e3 * sum(part_s), "ms"),
        Figure("loss of a node", 1e3 * drop_s, "ms", at_most=100),
        Figure("longest later call that sweeps", 1e3 * max(after_s), "ms"),
    ]  # fmt: skip
