"""`halfmoon bench engine`: the engine against transformers' own forward pass.

Same weights, same threads, same run, interleaved: each round times one side and then the other, so
that a busy or throttled machine slows both. Figures are medians over the rounds. The reference is
the unmodified model with scaled-dot-product attention, a `DynamicCache` and `logits_to_keep=1`; a
step of ours includes the sampling, the reference's does not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cluster.figures import Figure, Report, add_output_arguments
from core.requests import SamplingParams
from engine.base import SampleRequest, SequenceStep
from engine.models import resolve_model
from engine.transformers_engine import TransformersEngine

_BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure: a decode step after `context` tokens, or with batch 0 their prefill."""

    name: str
    batch: int
    context: int
    at_least: float


CASES = (
    Case("decode step, batch 16, context 512", 16, 512, 2.5),
    Case("decode step, batch 1, context 512", 1, 512, 1.3),
    Case("prefill of 2048 tokens", 0, 2048, 1.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own arguments."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default="smollm2-135m-instruct",
        help="a known model, a folder, or a hub id (smollm2-135m-instruct)",
    )
    add("--threads", type=int, default=1, help="threads of both sides (1)")
    add("--rounds", type=int, default=7, help="times each side is measured (7)")
    add("--chunk", type=int, default=512, help="tokens of our prefill chunks (512)")
    add("--isa", default="auto", help="kernels: auto, none, generic, x86-64-v3 or x86-64-v4")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure both sides and report our speed over the reference's."""
    model_dir = resolve_model(args.model)
    engine = TransformersEngine(
        model_dir,
        block_size=_BLOCK_SIZE,
        num_blocks=max(_blocks_needed(case, args.rounds) for case in CASES),
        max_model_len=max(case.context for case in CASES) + args.rounds + 2,
        num_threads=args.threads,
        isa=args.isa,
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    )
    report = Report(f"engine against transformers, {args.threads} thread(s), kernels {engine.isa}")
    for case in CASES:
        reference_s, ours_s = _measure(case, reference, engine, args)
        name = f"{case.name}: reference {reference_s * 1e3:.1f} ms, ours {ours_s * 1e3:.1f} ms"
        report.figures.append(Figure(name, reference_s / ours_s, "x as fast", case.at_least))
        report.details[case.name] = {"reference_s": reference_s, "ours_s": ours_s}
    engine.close()
    report.notes.append(f"Medians of {args.rounds} interleaved rounds; prefill chunk {args.chunk}.")
    return report


def _blocks_needed(case: Case, rounds: int) -> int:
    batch = max(case.batch, 1)
    return batch * -(-(case.context + rounds + 1) // _BLOCK_SIZE)


def _measure(
    case: Case, reference: PreTrainedModel, engine: TransformersEngine, args: argparse.Namespace
) -> tuple[float, float]:
    """Median seconds of the reference and of ours, timed in turn after one unmeasured round."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(case.batch, 1), case.context)
    tokens = torch.randint(0, engine.spec.vocab_size, shape, generator=generator)
    if case.batch == 0:
        sides = (_reference_prefill(reference, tokens), _our_prefill(engine, tokens, args.chunk))
    else:
        sides = (_reference_decode(reference, tokens), _our_decode(engine, tokens, args.chunk))
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(args.rounds + 1):
        for side, own in zip(sides, times, strict=True):
            started = time.perf_counter()
            side()
            if round_number > 0:
                own.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


@torch.inference_mode()
def _reference_forward(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> None:
    model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)


def _reference_prefill(model: PreTrainedModel, tokens: torch.Tensor) -> Callable[[], None]:
    return lambda: _reference_forward(model, tokens, DynamicCache(config=model.config))


def _reference_decode(model: PreTrainedModel, tokens: torch.Tensor) -> Callable[[], None]:
    """Fill a cache with `tokens`; each call then decodes one more token per sequence."""
    cache = DynamicCache(config=model.config)
    _reference_forward(model, tokens, cache)
    return lambda: _reference_forward(model, tokens[:, :1], cache)


def _our_prefill(
    engine: TransformersEngine, tokens: torch.Tensor, chunk: int
) -> Callable[[], None]:
    def prefill() -> None:
        for table, row in zip(_tables(engine, len(tokens)), tokens.tolist(), strict=True):
            for start in range(0, len(row), chunk):
                part = row[start : start + chunk]
                last = start + len(part) == len(row)
                sample = SampleRequest(_GREEDY, row, ()) if last else None
                engine.step([SequenceStep(part, start, table, sample)])

    return prefill


def _our_decode(engine: TransformersEngine, tokens: torch.Tensor, chunk: int) -> Callable[[], None]:
    """Fill the paged cache with `tokens`; each call then decodes one more token per sequence."""
    _our_prefill(engine, tokens, chunk)()
    tables = _tables(engine, len(tokens))
    rows = tokens.tolist()
    position = tokens.shape[1]

    def decode() -> None:
        nonlocal position
        steps = [
            SequenceStep(row[:1], position, table, SampleRequest(_GREEDY, row, ()))
            for row, table in zip(rows, tables, strict=True)
        ]
        engine.step(steps)
        position += 1

    return decode


def _tables(engine: TransformersEngine, batch: int) -> Sequence[Sequence[int]]:
    """One equal share of the blocks for each sequence."""
    share = engine.num_blocks // batch
    return [range(index * share, (index + 1) * share) for index in range(batch)]
