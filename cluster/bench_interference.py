"""`halfmoon bench interference`: what long prefills do to the token gaps of a running stream.

Measured through HTTP, alone and beside prefills in alternating rounds, for prefill and decode on
workers of their own (one core each) and for one coupled worker, which is the honest baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

from cluster.checks.client import (
    Completion,
    ask,
    checked,
    complete,
    first_model,
    random_prompt,
    session,
)
from cluster.figures import Figure, Report, add_output_arguments
from cluster.server_process import ServerProcess


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2-135m-instruct",
        help="a known model, a folder, or a hub id (smollm2-135m-instruct)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="long prompts (3000)")
    parser.add_argument("--gaps", type=int, default=1000, help="token gaps a condition (1000)")
    parser.add_argument(
        "--coupled-gaps", type=int, default=200, help="the same for the coupled baseline (200)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds (4)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Compare a stream's token gaps alone and beside prefills, disaggregated and coupled."""
    report = Report(f"bench interference: one stream beside {args.prompt_tokens}-token prefills")
    layouts: dict[str, dict[str, Any]] = {
        "1P1D": {"prefill": {"workers": 1}, "decode": {"workers": 1}},
        "coupled": {"prefill": {"workers": 0}, "decode": {"workers": 0}, "coupled": {"workers": 1}},
    }
    with tempfile.TemporaryDirectory(prefix="halfmoon-gaps-") as scratch, Progress() as progress:
        for name, layout in layouts.items():
            config = {"model": args.model, "hosts": 1, **layout}
            # A coupled worker computes a whole chunk between two tokens: its gaps take seconds.
            num_gaps = args.coupled_gaps if name == "coupled" else args.gaps
            with ServerProcess(config, Path(scratch) / name) as server:
                gaps = asyncio.run(_interfere(server, args, num_gaps, progress, name))
            p99 = {k: _quantile(v, 0.99) for k, v in gaps.items()}
            report.figures += [
                Figure(f"{name}: p99 gap {k} ({len(gaps[k])} gaps)", 1000 * v, "ms")
                for k, v in p99.items()
            ]
            report.figures.append(
                Figure(
                    f"{name}: p99 gap beside prefills / alone",
                    p99["beside prefills"] / p99["alone"],
                    "",
                    at_most=2.0 if name == "1P1D" else None,
                )
            )
            report.details[name] = gaps
    return report


async def _interfere(
    server: ServerProcess,
    args: argparse.Namespace,
    num_gaps: int,
    progress: Progress,
    name: str,
) -> dict[str, list[float]]:
    gaps: dict[str, list[float]] = {"alone": [], "beside prefills": []}
    chance = random.Random(1)
    per_round = -(-num_gaps // args.rounds)
    task = progress.add_task(name, total=2 * args.rounds)
    async with session() as http:
        model = await first_model(http, server.url)
        await ask(http, server.url, model, random_prompt(chance, 64), 4)
        for _ in range(args.rounds):
            for condition, values in gaps.items():
                started = asyncio.Event()
                stream = asyncio.create_task(
                    _stream(http, server, model, random_prompt(chance, 64), per_round + 1, started)
                )
                await started.wait()
                while condition != "alone" and not stream.done():
                    prefill = asyncio.create_task(
                        ask(http, server.url, model, random_prompt(chance, args.prompt_tokens), 1)
                    )
                    await asyncio.wait({prefill, stream}, return_when=asyncio.FIRST_COMPLETED)
                    if stream.done():
                        prefill.cancel()  # leaving is how a client ends a request
                        await asyncio.gather(prefill, return_exceptions=True)
                values += (await stream).gaps_s
                progress.advance(task)
    return gaps


async def _stream(
    http: aiohttp.ClientSession,
    server: ServerProcess,
    model: str,
    prompt: Sequence[int],
    num_tokens: int,
    started: asyncio.Event,
) -> Completion:
    try:
        result = await complete(
            http,
            server.url,
            model,
            prompt,
            num_tokens,
            ignore_eos=True,
            on_token=lambda _: started.set(),
        )
    finally:
        started.set()
    return checked(result)


def _quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
