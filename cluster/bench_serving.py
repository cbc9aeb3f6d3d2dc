"""`halfmoon bench ttft` and `halfmoon bench interference`: figures taken through HTTP.

Both start their own servers with one thread a worker, send random token ids (so that no prompt is
cached by accident), and compare times of one run, interleaved over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

from cluster.checks.client import Completion, complete, first_model, session
from cluster.figures import Figure, Report, add_output_arguments
from cluster.server_process import ServerProcess
from core.errors import HalfmoonError

TOKEN_RANGE = (1000, 40_000)
"""Ordinary token ids of every usual vocabulary: no control tokens."""


def add_ttft_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `bench ttft`."""
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    add_output_arguments(parser)


def run_ttft(args: argparse.Namespace) -> Report:
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
            await _ask(http, server, model, _prompt(chance, 64), 2)  # first use of everything
            await _ask(http, server, model, _prompt(chance, 64), 2)
            for _ in range(args.rounds):
                prompt = _prompt(chance, args.prompt_tokens)
                # Round-robin over two prefill workers: other, then same, then one to stay in step.
                for phase in ("cold", "other", "same"):
                    result = await _ask(http, server, model, prompt, 2)
                    if (result.cached_tokens > 0) != (phase != "cold"):
                        raise HalfmoonError(f"{phase}: {result.cached_tokens} cached tokens")
                    times[phase].append(result.ttft_s)
                await _ask(http, server, model, _prompt(chance, 16), 2)
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


def add_interference_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `bench interference`."""
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--gaps", type=int, default=1000, help="token gaps a condition (1000)")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds (4)")
    add_output_arguments(parser)


def run_interference(args: argparse.Namespace) -> Report:
    """Compare a stream's token gaps alone and beside prefills, disaggregated and coupled."""
    report = Report(
        f"bench interference: one stream beside {args.prompt_tokens}-token prefills, "
        f"{args.gaps} gaps a condition"
    )
    layouts: dict[str, dict[str, Any]] = {
        "1P1D": {"prefill": {"workers": 1}, "decode": {"workers": 1}},
        "coupled": {"prefill": {"workers": 0}, "decode": {"workers": 0}, "coupled": {"workers": 1}},
    }
    with tempfile.TemporaryDirectory(prefix="halfmoon-gaps-") as scratch, Progress() as progress:
        for name, layout in layouts.items():
            config = {"model": args.model, "hosts": 1, **layout}
            with ServerProcess(config, Path(scratch) / name) as server:
                gaps = asyncio.run(_interfere(server, args, progress, name))
            p99 = {k: _quantile(v, 0.99) for k, v in gaps.items()}
            report.figures += [
                Figure(f"{name}: p99 gap {k}", 1000 * v, "ms") for k, v in p99.items()
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
    server: ServerProcess, args: argparse.Namespace, progress: Progress, name: str
) -> dict[str, list[float]]:
    gaps: dict[str, list[float]] = {"alone": [], "beside prefills": []}
    chance = random.Random(1)
    per_round = -(-args.gaps // args.rounds)
    task = progress.add_task(name, total=2 * args.rounds)
    async with session() as http:
        model = await first_model(http, server.url)
        await _ask(http, server, model, _prompt(chance, 64), 4)
        for _ in range(args.rounds):
            for condition, values in gaps.items():
                started = asyncio.Event()
                stream = asyncio.create_task(
                    _stream(http, server, model, _prompt(chance, 64), per_round + 1, started)
                )
                await started.wait()
                while condition != "alone" and not stream.done():
                    prefill = asyncio.create_task(
                        _ask(http, server, model, _prompt(chance, args.prompt_tokens), 1)
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
    return _checked(result)


async def _ask(
    http: aiohttp.ClientSession,
    server: ServerProcess,
    model: str,
    prompt: Sequence[int],
    num_tokens: int,
) -> Completion:
    return _checked(await complete(http, server.url, model, prompt, num_tokens, ignore_eos=True))


def _checked(result: Completion) -> Completion:
    if result.error is not None:
        raise HalfmoonError(result.error)
    return result


def _prompt(chance: random.Random, num_tokens: int) -> list[int]:
    return [chance.randrange(*TOKEN_RANGE) for _ in range(num_tokens)]


def _quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
