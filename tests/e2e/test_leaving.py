"""Clients that leave at every moment (B35)."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct

import pytest

from tests.harness.local_cluster import (
    COMPLETIONS,
    MODEL,
    LocalCluster,
    Shape,
    num_descriptors,
    running,
)

ONE_EACH = Shape(prefill=1, decode=1)
GREEDY = {"max_tokens": 60, "ignore_eos": True}


def prompt_of(i: int, length: int = 70) -> list[int]:
    return [(i * 37 + j * 11 + 5) % 200 for j in range(length)]


async def send(cluster: LocalCluster, prompt: list[int], stream: bool) -> asyncio.StreamWriter:
    """Send a request and read nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    raw = json.dumps({"model": MODEL, "prompt": prompt, "stream": stream, **GREEDY}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    return writer


async def leave(writer: asyncio.StreamWriter, reset: bool) -> None:
    if reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
        await writer.wait_closed()


async def reach(cluster: LocalCluster, phase: str) -> None:
    """Make the next requests stop in a phase: its engine is held there."""
    match phase:
        case "queued" | "prefill":
            cluster.engines["prefill-0"].hold_steps(after=1)
        case "hand-off":
            cluster.engines["decode-0"].hold_loads(after=2)
        case "decode":
            cluster.engines["decode-0"].hold_steps(after=3)


@pytest.mark.parametrize("phase", ["queued", "prefill", "hand-off", "decode"])
async def test_b35_work_stops_when_the_client_leaves(monkeypatch, phase):
    """B35: what is not told to P or D is computed for nobody, and its slots never come back."""
    async with running(monkeypatch, ONE_EACH) as cluster:
        held = cluster.engines["prefill-0" if phase in ("queued", "prefill") else "decode-0"]
        base_fds = None
        for i, (stream, reset) in enumerate((s, r) for s in (False, True) for r in (False, True)):
            await reach(cluster, phase)
            first = await send(cluster, prompt_of(2 * i), stream)
            await cluster.until(lambda: held.is_held)
            writers = [first]
            if phase == "queued":
                writers.append(await send(cluster, prompt_of(2 * i + 1), stream))
                await cluster.until(lambda: cluster.gateway.dispatcher.num_requests == 2)
            for writer in reversed(writers):
                await leave(writer, reset)
            # The gateway has let go before anything that is held goes on.
            await cluster.until(lambda: cluster.gateway.dispatcher.num_requests == 0)
            steps = {name: engine.num_steps for name, engine in cluster.engines.items()}
            held.release()
            await cluster.settle()
            made = sum(e.num_steps - steps[n] for n, e in cluster.engines.items())
            assert made <= 1, "only the step that was running ends"
            await cluster.check(prompt_of(2 * i), **GREEDY)
            await cluster.settle()
            base_fds = base_fds or num_descriptors()
            assert num_descriptors() == base_fds


async def test_b35_others_in_the_batch_are_not_disturbed(monkeypatch):
    """B35: an abort that frees a neighbour's blocks changes its text."""
    async with running(monkeypatch, Shape(prefill=2, decode=2, decode_blocks=60)) as cluster:
        chance = random.Random(35)
        staying = [
            asyncio.create_task(cluster.check(prompt_of(i, 40 + 5 * i), **GREEDY)) for i in range(8)
        ]

        async def come_and_go(i: int) -> None:
            writer = await send(cluster, prompt_of(chance.randrange(12)), stream=i % 2 == 0)
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.2)
            await leave(writer, reset=i % 3 == 0)

        await asyncio.gather(*(come_and_go(i) for i in range(60)))
        await asyncio.gather(*staying)
