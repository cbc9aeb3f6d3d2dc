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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from core.requests import SamplingParams
from engine.base import SampleRequest, SequenceStep
from engine.transformers_engine import TransformersEngine

_BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach: our speed over the reference's, at least `ratio`."""

    name: str
    batch: int
    context: int
    ratio: float

    @property
    def is_prefill(self) -> bool:
        """Whether the whole context is computed, rather than one token after it."""
        return self.batch == 0


TARGETS = (
    Target("decode step, batch 16, 512 tokens of context", 16, 512, 2.5),
    Target("decode step, batch 1, 512 tokens of context", 1, 512, 1.3),
    Target("prefill of 2048 tokens", 0, 2048, 1.0),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured line; times are medians."""

    name: str
    reference_s: float
    ours_s: float
    ratio: float
    target: float

    @property
    def is_met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own arguments."""
    parser.add_argument("model", type=Path, help="folder of the model, weights in safetensors")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    parser.add_argument("--rounds", type=int, default=7, help="times each side is measured")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of our prefill chunks")
    parser.add_argument("--isa", default="auto", help="auto, none, generic, x86-64-v3, x86-64-v4")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return `{"figures": [...], "missed": [names], ...}`."""
    model_dir = Path(args.model)
    torch.set_num_threads(args.threads)
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    )
    longest = max(target.context for target in TARGETS) + args.rounds + 2
    num_blocks = max((t.context + args.rounds + 2) * max(t.batch, 1) for t in TARGETS)
    engine = TransformersEngine(
        model_dir,
        block_size=_BLOCK_SIZE,
        num_blocks=-(-num_blocks // _BLOCK_SIZE) + max(t.batch for t in TARGETS),
        max_model_len=longest,
        num_threads=args.threads,
        isa=args.isa,
    )
    print(f"{args.threads} thread(s), kernels: {engine.isa}, {args.rounds} rounds, medians")
    figures = [_measure(target, reference, engine, args) for target in TARGETS]
    engine.close()
    return {
        "threads": args.threads,
        "isa": engine.isa,
        "figures": [{**asdict(figure), "is_met": figure.is_met} for figure in figures],
        "missed": [figure.name for figure in figures if not figure.is_met],
    }


def _measure(
    target: Target,
    reference: PreTrainedModel,
    engine: TransformersEngine,
    args: argparse.Namespace,
) -> Figure:
    """Time both sides in turn, after one unmeasured round, and print the line."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(target.batch, 1), target.context)
    tokens = torch.randint(0, engine.spec.vocab_size, shape, generator=generator)
    if target.is_prefill:
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
    reference_s, ours_s = (statistics.median(own) for own in times)
    figure = Figure(target.name, reference_s, ours_s, reference_s / ours_s, target.ratio)
    print(
        f"{figure.name:46s} reference {reference_s * 1e3:9.1f} ms   ours {ours_s * 1e3:9.1f} ms   "
        f"{figure.ratio:5.2f}x   target {target.ratio:.1f}x {'ok' if figure.is_met else 'MISSED'}"
    )
    return figure


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
