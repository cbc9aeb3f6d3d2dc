"""`halfmoon check kill`: kill -9 each kind of process under load, and compare every answer.

A 2P2D server on two pool nodes gets a steady load of four greedy streams. One process of each kind
is killed while they run: the busiest prefill or decode worker, a pool node, the Conductor, the
gateway. Afterwards:

- every answer must be the reference's (`transformers` generate), except that streams which hung on
  a killed gateway end with it;
- new requests are answered within ten seconds of the kill of the Conductor;
- the killed process is back, as `halfmoon status` tells, and every counter is at its base.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.progress import Progress

from cluster.checks.client import Completion, complete, first_model, session
from cluster.checks.prompts import Prompt, load_prompts
from cluster.checks.reference import Reference, compare, load_reference
from cluster.figures import Figure, Report, add_output_arguments
from cluster.server_process import ServerProcess
from cluster.state_dir import ProcessRecord
from core.errors import HalfmoonError
from core.messages.to_conductor import ClusterState, WorkerRole, WorkerState

KINDS = ("prefill", "decode", "pool", "conductor", "gateway")
LOAD = 4
NUM_PROMPTS = 16
MIN_OUTPUT_TOKENS = 24
SETTLE_TIMEOUT_S = 60.0
CONDUCTOR_LIMIT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2-135m-instruct",
        help="a known model, a folder, or a hub id (smollm2-135m-instruct)",
    )
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="kill these only; may be repeated (all)"
    )
    parser.add_argument("--trials", type=int, default=1, help="kills of each kind (1)")
    parser.add_argument("--max-tokens", type=int, default=48, help="output tokens a stream (48)")
    parser.add_argument("--work-dir", type=Path, help="where the server keeps logs")
    add_output_arguments(parser)


@dataclass(slots=True)
class Trial:
    """One kill and what came of it. Seconds count from the kill."""

    kind: str
    victim: str = ""
    num_streams: int = 0
    num_broken: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    slowest_new_ttft_s: float = 0.0
    back_after_s: float = 0.0
    leftovers: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> Report:
    """Kill, compare, report."""
    from engine.models import inspect_model, resolve_model

    model_dir = resolve_model(args.model)
    eos_token_ids = inspect_model(model_dir).eos_token_ids
    reference = load_reference(model_dir)
    config = {"model": args.model, "hosts": 2, "prefill": {"workers": 2}, "decode": {"workers": 2}}
    with tempfile.TemporaryDirectory(prefix="halfmoon-kill-") as scratch, Progress() as progress:
        prompts = _long_answers(
            load_prompts(model_dir, longest=700)[::2], reference, args.max_tokens, progress
        )
        trials = []
        with ServerProcess(config, args.work_dir or Path(scratch)) as server:
            kinds = args.kind or list(KINDS)
            task = progress.add_task("kills", total=len(kinds) * args.trials)
            for kind in kinds * args.trials:
                check = _KillCheck(server, kind, prompts, args.max_tokens)
                asyncio.run(check.run())
                check.judge(eos_token_ids, reference)
                trials.append(check.trial)
                progress.advance(task)
    return _report(trials)


def _long_answers(
    prompts: Sequence[Prompt], reference: Reference, max_tokens: int, progress: Progress
) -> list[Prompt]:
    """The first `NUM_PROMPTS` whose right answer is long enough to be interrupted."""
    task = progress.add_task("reference", total=NUM_PROMPTS)
    chosen: list[Prompt] = []
    for prompt in prompts:
        answer = reference.generate(prompt.token_ids, max_tokens)
        if len(answer.token_ids) >= min(MIN_OUTPUT_TOKENS, max_tokens):
            chosen.append(prompt)
            progress.advance(task)
        if len(chosen) == NUM_PROMPTS:
            break
    reference.unload()
    if not chosen:
        raise HalfmoonError(f"no answer of this model reaches {MIN_OUTPUT_TOKENS} tokens")
    return chosen


def _report(trials: Sequence[Trial]) -> Report:
    report = Report("check kill")
    for kind, group in itertools.groupby(sorted(trials, key=lambda t: KINDS.index(t.kind)), _kind):
        each = list(group)
        report.figures += [
            Figure(f"{kind}: trials", len(each), ""),
            Figure(f"{kind}: streams compared", sum(t.num_streams for t in each), ""),
            Figure(f"{kind}: wrong or lost answers", sum(len(t.wrong) for t in each), "",
                   at_most=0),
            Figure(f"{kind}: counters not at base", sum(len(t.leftovers) for t in each), "",
                   at_most=0),
            Figure(f"{kind}: back after", max(t.back_after_s for t in each), "s"),
            Figure(f"{kind}: longest token gap, median of trials",
                   statistics.median(t.longest_gap_s for t in each), "s"),
        ]  # fmt: skip
        slowest_s = max(t.slowest_new_ttft_s for t in each)
        limit_s = CONDUCTOR_LIMIT_S if kind == "conductor" else None
        report.figures.append(
            Figure(f"{kind}: slowest first token of a new request", slowest_s, "s", at_most=limit_s)
        )
    report.notes = [f"{t.kind} {t.victim}: {n}" for t in trials for n in (*t.wrong, *t.leftovers)]
    return report


def _kind(trial: Trial) -> str:
    return trial.kind


class _KillCheck:
    """One trial: load, kill, load on until everything in flight at the kill has ended."""

    def __init__(
        self, server: ServerProcess, kind: str, prompts: Sequence[Prompt], max_tokens: int
    ) -> None:
        self.trial = Trial(kind)
        self._server = server
        self._prompts: Iterator[Prompt] = itertools.cycle(prompts)
        self._max_tokens = max_tokens
        self._results: list[tuple[Prompt, Completion]] = []
        self._num_flowing = 0
        self._killed: ProcessRecord | None = None
        self._killed_s: float | None = None
        self._stop = False

    async def run(self) -> None:
        """Run the trial. Raises `HalfmoonError` when the process does not come back."""
        async with session() as http:
            model = await first_model(http, self._server.url)
            streams = [asyncio.create_task(self._stream_on(http, model)) for _ in range(LOAD)]
            while self._num_flowing < LOAD:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(self._kill)
            await asyncio.to_thread(self._await_return)
            self._stop = True
            await asyncio.gather(*streams)
        await asyncio.to_thread(self._settle)

    async def _stream_on(self, http: aiohttp.ClientSession, model: str) -> None:
        """Keep one stream going; one more after the process is back."""
        last = False
        while not last:
            last = self._stop
            prompt = next(self._prompts)
            counted = False

            def on_token(result: Completion) -> None:
                nonlocal counted
                if not counted and len(result.token_ids) >= 3:
                    counted = True
                    self._num_flowing += 1

            result = await complete(
                http, self._server.url, model, prompt.token_ids, self._max_tokens,
                on_token=on_token,
            )  # fmt: skip
            self._num_flowing -= counted
            self._results.append((prompt, result))
            if result.error is not None and self.trial.kind == "gateway":
                await asyncio.sleep(0.2)  # nobody listens until it is back

    def _kill(self) -> None:
        victim = self._victim()
        self.trial.victim = victim
        record = next(r for r in self._server.records(self.trial.kind) if r.name == victim)
        self._killed = record
        self._killed_s = time.monotonic()
        self._server.kill(record.pid)

    def _victim(self) -> str:
        """The busiest process of the kind."""
        records = self._server.records(self.trial.kind)
        if not records:
            raise HalfmoonError(f"no {self.trial.kind} process runs")
        assigned = {w.name: w.num_assigned for w in self._server.cluster_state().workers}
        return max(records, key=lambda r: assigned.get(r.name, 0)).name

    def _await_return(self) -> None:
        assert self._killed is not None and self._killed_s is not None
        while time.monotonic() - self._killed_s < SETTLE_TIMEOUT_S:
            back = [r for r in self._server.records(self.trial.kind)
                    if r.name == self.trial.victim and r.pid != self._killed.pid]  # fmt: skip
            if back and self._server.is_ready() and self._is_registered(back[0].incarnation):
                self.trial.back_after_s = time.monotonic() - self._killed_s
                return
            time.sleep(0.2)
        raise HalfmoonError(f"{self.trial.victim} did not come back: {self._server.log_tail()}")

    def _is_registered(self, incarnation: str) -> bool:
        if self.trial.kind in ("conductor", "gateway"):
            return True  # `/ready` needs both
        try:
            state = self._server.cluster_state()
        except (HalfmoonError, TimeoutError):
            return False
        return any(w.incarnation == incarnation for w in state.workers)

    def _settle(self) -> None:
        """Wait for every counter to be at its base; note what is not."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            left = leftovers(self._server.cluster_state())
            if not left or time.monotonic() > deadline_s:
                self.trial.leftovers = left
                return
            time.sleep(0.3)

    def judge(self, eos_token_ids: Sequence[int], reference: Reference) -> None:
        """Compare every answer with the reference."""
        assert self._killed_s is not None
        for prompt, result in self._results:
            broken = self.trial.kind == "gateway" and result.error is not None
            if broken and result.sent_s < self._killed_s + self.trial.back_after_s:
                self.trial.num_broken += 1
                continue
            self.trial.num_streams += 1
            if result.error is not None:
                self.trial.wrong.append(f"{prompt.name}: {result.error}")
                continue
            _, mismatch = compare(
                prompt.name, prompt.token_ids, result.token_ids, self._max_tokens, eos_token_ids,
                reference,
            )  # fmt: skip
            if mismatch is not None:
                self.trial.wrong.append(str(mismatch))
            self.trial.longest_gap_s = max(self.trial.longest_gap_s, *result.gaps_s, 0.0)
            if result.sent_s > self._killed_s:
                self.trial.slowest_new_ttft_s = max(self.trial.slowest_new_ttft_s, result.ttft_s)


def leftovers(state: ClusterState) -> list[str]:
    """Everything that is not at its base value in a cluster without requests."""
    return [text for worker in state.workers for text in _leftovers_of(worker)]


def _leftovers_of(worker: WorkerState) -> list[str]:
    counts: dict[str, int] = {"assigned": worker.num_assigned}
    if worker.report is not None:
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            load = worker.report.prefill if role is WorkerRole.PREFILL else worker.report.decode
            if load is not None:
                counts[f"{role} waiting"] = load.num_waiting
                counts[f"{role} running"] = load.num_running
    if worker.pool_report is not None:
        counts["reserved"] = worker.pool_report.num_reserved
        counts["quarantined"] = worker.pool_report.num_quarantined
        counts["leases"] = worker.pool_report.num_leases
    return [f"{worker.name}: {count} {what}" for what, count in counts.items() if count]
