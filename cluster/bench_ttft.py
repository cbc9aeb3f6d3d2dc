"""`halfmoon bench ttft`: how much of the time to first token a cached prompt saves, through HTTP.

Two prefill workers on two pool nodes, one thread each; random token ids, so that nothing is cached
by accident; the conditions alternate and their ratio is taken within each round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path

from rich.progress import Progress

from cluster.checks.client import (
    ask,
    first_model,
    random_prompt,
    session,
)
from cluster.figures import Figure, Report, add_output_arguments
from cluster.server_process import ServerProcess
from core.errors import HalfmoonError

PAUSE_S = 0.5
"""Between requests: the directory hears of new blocks every 50 ms."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2-135m-instruct",
        help="a known model, a folder, or a hub id (smollm2-135m-instruct)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="each prompt (2000)")
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured (5)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Time the first token of a prompt: cold, repeated on the other prefill worker, on the same."""
    config = {
        "model": args.model,
        "hosts": 2,
        "prefill": {"workers": 2},
        "decode": {"workers": 2},
        "scheduler": {"policy": "round-robin"},
    }
    chance = random.Random(0)

    async def measure(server: ServerProcess, progress: Progress) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"cold": [], "other": [], "same": []}
        task = progress.add_task("rounds", total=args.rounds)
        async with session() as http:
            model = await first_model(http, server.url)
            for _ in range(2):  # the first use of everything, on both prefill workers
                await ask(http, server.url, model, random_prompt(chance, 64), 2)
            for _ in range(args.rounds):
                prompt = random_prompt(chance, args.prompt_tokens)
                # Round-robin over two prefill workers: other, then same, then one to stay in step.
                for phase in ("cold", "other", "same"):
                    await asyncio.sleep(PAUSE_S)
                    result = await ask(http, server.url, model, prompt, 2)
                    if (result.cached_tokens > 0) != (phase != "cold"):
                        raise HalfmoonError(f"{phase}: {result.cached_tokens} cached tokens")
                    times[phase].append(result.ttft_s)
                await ask(http, server.url, model, random_prompt(chance, 16), 2)
                progress.advance(task)
        return times

    with (
        tempfile.TemporaryDirectory(prefix="halfmoon-ttft-") as scratch,
        Progress() as progress,
        ServerProcess(config, Path(scratch)) as server,
    ):
        times = asyncio.run(measure(server, progress))
    medians = {phase: statistics.median(values) for phase, values in times.items()}
    report = Report(f"bench ttft: {args.prompt_tokens} tokens, median of {args.rounds} rounds")
    report.figures = [Figure(f"TTFT {phase}", value, "s") for phase, value in medians.items()]
    report.figures += [
        Figure(
            f"TTFT repeated on the {phase} prefill worker / cold",
            statistics.median(
                warm / cold for warm, cold in zip(times[phase], times["cold"], strict=True)
            ),
            "",
            at_most=0.10,
        )
        for phase in ("same", "other")
    ]
    report.details = {"ttft_s": times}
    return report
