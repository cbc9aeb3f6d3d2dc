"""`halfmoon check parity`: are our tokens exactly those of `transformers` generate?

For each suite it starts its own servers, sends the prompts as token ids over HTTP, greedy, and
compares token by token with the reference on the same weights in float32. Near-ties (the two
largest logits closer than `reference.NEAR_TIE`) are counted apart; anything else that differs is
a failure. Suites:

- `base`: {1P1D, 2P2D on two pool nodes} x {cold, warm, warm on the other prefill worker}, one
  request at a time, then ten prompts whose decode worker is killed in the middle of the stream;
- `concurrent`: 2P2D, eight requests in flight, cold and warm;
- `preempt`: 1P1D, eight in flight, with so few decode blocks that requests are preempted: all
  prompts, then the short ones with fewer blocks yet.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from cluster.checks.client import Completion, complete, first_model, session
from cluster.checks.prompts import Prompt, load_prompts
from cluster.checks.reference import NEAR_TIE, Mismatch, NearTie, Reference, compare, load_reference
from cluster.figures import Figure, Report, add_output_arguments
from cluster.server_process import ServerProcess
from core.messages.to_conductor import WorkerRole

SUITES = ("base", "concurrent", "preempt")
NUM_KILLED = 10
KILL_AFTER_TOKENS = 6
SMALL_BLOCK = 4
"""Tokens in a block where requests are to be preempted."""
SOURCES = "vllm:prompt_tokens_by_source_total"


@dataclass(slots=True)
class Outcome:
    """What one pass over the prompts gave."""

    label: str
    num_tokens: int = 0
    cached_tokens: int = 0
    sources: dict[str, float] = field(default_factory=dict)
    near_ties: list[NearTie] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_preempted: int | None = None
    seconds: float = 0.0

    @property
    def pool_tokens(self) -> float:
        """Prompt tokens that came from the pool."""
        return self._tokens_from("external_kv_transfer")

    @property
    def local_tokens(self) -> float:
        """Prompt tokens that were in the prefill worker's own paged cache."""
        return self._tokens_from("local_cache_hit")

    def _tokens_from(self, source: str) -> float:
        return sum(v for name, v in self.sources.items() if f'source="{source}"' in name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2-135m-instruct",
        help="a known model, a folder, or a hub id (smollm2-135m-instruct)",
    )
    parser.add_argument("--suite", choices=(*SUITES, "all"), default="base", help="(base)")
    parser.add_argument("--prompts", type=int, default=60, help="how many prompts (60)")
    parser.add_argument("--longest", type=int, default=3000, help="longest prompt in tokens (3000)")
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens a prompt (32)")
    parser.add_argument("--work-dir", type=Path, help="where servers keep logs (a temporary one)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Run the chosen suites and report."""
    from engine.models import inspect_model, resolve_model

    model_dir = resolve_model(args.model)
    info = inspect_model(model_dir)

    prompts = load_prompts(
        model_dir,
        longest=min(args.longest, info.context_tokens - args.max_tokens),
        count=args.prompts,
    )
    reference = load_reference(model_dir)
    with tempfile.TemporaryDirectory(prefix="halfmoon-parity-") as scratch, Progress() as progress:
        check = _Parity(
            args.model,
            prompts,
            args.max_tokens,
            tuple(info.eos_token_ids),
            reference,
            args.work_dir or Path(scratch),
            progress,
        )
        check.prepare()
        for suite in SUITES if args.suite == "all" else (args.suite,):
            getattr(check, f"suite_{suite}")()
    return _report(check.outcomes, args.suite)


def _report(outcomes: Sequence[Outcome], suite: str) -> Report:
    report = Report(f"check parity ({suite})")
    num_tokens = sum(o.num_tokens for o in outcomes)
    ties = [t for o in outcomes for t in o.near_ties]
    bad = [f"{o.label}: {m}" for o in outcomes for m in o.mismatches]
    bad += [f"{o.label}: {e}" for o in outcomes for e in o.errors]
    for outcome in outcomes:
        report.figures.append(
            Figure(f"{outcome.label}: tokens", outcome.num_tokens, "tokens", at_least=1)
        )
    preempted = [o.num_preempted for o in outcomes if o.num_preempted is not None]
    if preempted:  # without one, nothing was proven
        report.figures.append(Figure("preemptions", sum(preempted), "", at_least=1))
    report.figures += [
        Figure("tokens compared", num_tokens, "tokens"),
        Figure("mismatches and errors", len(bad), "", at_most=0),
        Figure("near-ties per 1,000 tokens", 1000 * len(ties) / max(1, num_tokens), "", at_most=1),
        Figure("seconds", sum(o.seconds for o in outcomes), "s"),
    ]
    report.notes = bad + [f"near-tie (gap < {NEAR_TIE:g}): {t}" for t in ties]
    report.details = {"outcomes": [asdict(o) for o in outcomes]}
    return report


@dataclass(slots=True)
class _Parity:
    model: str
    prompts: list[Prompt]
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    reference: Reference
    work_dir: Path
    progress: Progress
    outcomes: list[Outcome] = field(default_factory=list)

    def prepare(self) -> None:
        """Make the reference first, while no server competes for the cores."""
        task = self.progress.add_task("reference", total=len(self.prompts))
        for prompt in self.prompts:
            self.reference.generate(prompt.token_ids, self.max_tokens)
            self.progress.advance(task)
        self.reference.unload()

    def suite_base(self) -> None:
        """Both topologies, cold and warm, one at a time; then kills."""
        with self._server("1p1d", prefill=1, decode=1, hosts=1) as server:
            self._pass("1P1D cold", server)
            self._pass("1P1D warm", server, expect_hits=True)
            self._kill_pass("1P1D killed", server, self._prompts_to_kill()[: NUM_KILLED // 2])
        with self._server("2p2d", prefill=2, decode=2, hosts=2) as server:
            self._pass("2P2D cold", server)
            self._pass("2P2D warm", server, expect_hits=True)
            # Round-robin: one request more and each prompt meets the other prefill worker.
            self._send(server, self.prompts[:1], 1, lambda done: None)
            self._pass("2P2D warm, other prefill", server, expect_hits=True, other=True)
            self._kill_pass("2P2D killed", server, self._prompts_to_kill()[NUM_KILLED // 2 :])

    def suite_concurrent(self) -> None:
        """Eight requests in flight."""
        with self._server("8-in-flight", prefill=2, decode=2, hosts=2) as server:
            self._pass("2P2D x8 cold", server, concurrency=8)
            self._pass("2P2D x8 warm", server, concurrency=8, expect_hits=True)

    def suite_preempt(self) -> None:
        """Eight in flight over decode memory for little more than the longest of them.

        First all; but while the long ones are computed, decode keeps up. Then the short ones, many
        of which are in decode at once. With small blocks each grows by more of them than it is
        made to leave free when it is admitted.
        """
        longest = max(len(p.token_ids) for p in self.prompts)
        short = [p for p in self.prompts if len(p.token_ids) <= longest // 40]
        for name, prompts in (("all", self.prompts), ("short", short)):
            needed = max(len(p.token_ids) for p in prompts) + self.max_tokens
            blocks = -(-needed // SMALL_BLOCK) + 2
            with self._server(
                f"preempt-{name}", prefill=1, decode=1, hosts=1, few_blocks=blocks
            ) as server:
                self._pass(f"1P1D x8 few blocks, {name}", server, prompts, concurrency=8)
                num_preempted = sum(server.metric("vllm:num_preemptions_total").values())
            self.outcomes[-1].num_preempted = int(num_preempted)

    def _server(
        self, name: str, *, prefill: int, decode: int, hosts: int, few_blocks: int | None = None
    ) -> ServerProcess:
        config: dict[str, Any] = {
            "model": self.model,
            "hosts": hosts,
            "prefill": {"workers": prefill},
            "decode": {"workers": decode},
            "scheduler": {"policy": "round-robin"},
        }
        if few_blocks is not None:
            config["block_size"] = SMALL_BLOCK
            config["decode"]["num_blocks"] = few_blocks
        return ServerProcess(config, self.work_dir / name)

    def _prompts_to_kill(self) -> list[Prompt]:
        """Prompts whose reference is long enough to be cut in the middle."""
        long = [
            p
            for p in self.prompts
            if len(self.reference.generate(p.token_ids, self.max_tokens).token_ids)
            > KILL_AFTER_TOKENS + 4
        ]
        return long[:: max(1, len(long) // NUM_KILLED)][:NUM_KILLED]

    def _pass(
        self,
        label: str,
        server: ServerProcess,
        prompts: Sequence[Prompt] | None = None,
        *,
        concurrency: int = 1,
        expect_hits: bool = False,
        other: bool = False,
    ) -> None:
        prompts = self.prompts if prompts is None else prompts
        outcome = Outcome(label)
        task = self.progress.add_task(label, total=len(prompts))
        started_s = time.monotonic()
        before = server.metric(SOURCES)
        results = self._send(server, prompts, concurrency, lambda _: self.progress.advance(task))
        outcome.sources = {
            name: value - before.get(name, 0.0) for name, value in server.metric(SOURCES).items()
        }
        self._judge(outcome, prompts, results, started_s)
        if expect_hits and outcome.cached_tokens == 0:
            outcome.errors.append("no prompt token came from the cache in a warm pass")
        if other and not outcome.pool_tokens > outcome.local_tokens:
            outcome.errors.append("most hits were local: the prefill worker was not the other one")

    def _kill_pass(self, label: str, server: ServerProcess, prompts: Sequence[Prompt]) -> None:
        """Kill -9 the decode worker that serves the stream, in the middle of it, once a prompt."""
        outcome = Outcome(label)
        task = self.progress.add_task(label, total=len(prompts))
        started_s = time.monotonic()
        results = []
        for prompt in prompts:
            killer = _Killer(server)
            results += self._send(
                server,
                [prompt],
                1,
                lambda _: self.progress.advance(task),
                on_token=killer.on_token,
            )
            if killer.killed != 1:
                outcome.errors.append(f"{prompt.name}: killed {killer.killed} workers, not 1")
        self._judge(outcome, prompts, results, started_s)

    def _judge(
        self,
        outcome: Outcome,
        prompts: Sequence[Prompt],
        results: Sequence[Completion],
        started_s: float,
    ) -> None:
        outcome.seconds = time.monotonic() - started_s
        for prompt, result in zip(prompts, results, strict=True):
            if result.error is not None:
                outcome.errors.append(f"{prompt.name}: {result.error}")
                continue
            outcome.num_tokens += len(result.token_ids)
            outcome.cached_tokens += result.cached_tokens
            ties, mismatch = compare(
                prompt.name,
                prompt.token_ids,
                result.token_ids,
                self.max_tokens,
                self.eos_token_ids,
                self.reference,
            )
            outcome.near_ties += ties
            if mismatch is not None:
                outcome.mismatches.append(mismatch)
        self.reference.unload()
        self.outcomes.append(outcome)

    def _send(
        self,
        server: ServerProcess,
        prompts: Sequence[Prompt],
        concurrency: int,
        advance: Callable[[Completion], None],
        on_token: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        async def main() -> list[Completion]:
            gate = asyncio.Semaphore(concurrency)
            async with session() as http:
                model = await first_model(http, server.url)

                async def one(prompt: Prompt) -> Completion:
                    async with gate:
                        result = await complete(
                            http,
                            server.url,
                            model,
                            prompt.token_ids,
                            self.max_tokens,
                            on_token=on_token,
                        )
                    advance(result)
                    return result

                return list(await asyncio.gather(*(one(p) for p in prompts)))

        return asyncio.run(main())


class _Killer:
    """Kills the decode worker that a stream runs on, once, when the stream is under way."""

    def __init__(self, server: ServerProcess) -> None:
        self.killed = 0
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def on_token(self, result: Completion) -> None:
        if len(result.token_ids) == KILL_AFTER_TOKENS and self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._kill))

    def _kill(self) -> None:
        state = self._server.cluster_state()
        busy = {w.name for w in state.workers if w.role == WorkerRole.DECODE and w.num_assigned}
        for record in self._server.records("decode"):
            if record.name in busy:
                self._server.kill(record.pid)
                self.killed += 1
