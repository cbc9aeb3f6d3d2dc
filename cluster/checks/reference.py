"""What `transformers` itself generates: the oracle of `halfmoon check parity`.

Greedy, float32, the model's own attention (sdpa) and cache, one prompt at a time. Besides the
tokens it records the gap between the two largest logits at each step, because where that is tiny
two correct programs may differ by rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NEAR_TIE = 1e-4
"""Logit gap below which rounding may decide."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy output and, for each token, the gap between the two largest logits."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


class Reference:
    """`transformers` generate on one model, with results kept in `cache_dir` between runs."""

    def __init__(self, model_dir: Path, fingerprint: str, cache_dir: Path, threads: int) -> None:
        self._model_dir = model_dir
        self._fingerprint = fingerprint
        self._cache_dir = cache_dir
        self._threads = threads
        self._generate: Callable[[Sequence[int], int], Generation] | None = None

    def generate(self, token_ids: Sequence[int], max_tokens: int) -> Generation:
        """Return up to `max_tokens` greedy tokens after `token_ids`, end token included."""
        key = json.dumps([self._fingerprint, list(token_ids), max_tokens])
        path = self._cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        if path.exists():
            raw = json.loads(path.read_text())
            return Generation(tuple(raw["token_ids"]), tuple(raw["gaps"]))
        if self._generate is None:
            self._generate = _load(self._model_dir, self._threads)
        result = self._generate(token_ids, max_tokens)
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(result)))
        partial.rename(path)
        return result

    def unload(self) -> None:
        """Give the model's memory back."""
        self._generate = None


def load_reference(model_dir: Path, threads: int = 2) -> Reference:
    """Return the reference of a model, with results kept in the user's cache directory."""
    from engine.models import inspect_model, user_cache_dir

    fingerprint = inspect_model(model_dir).fingerprint
    return Reference(model_dir, fingerprint, user_cache_dir() / "reference", threads)


def _load(model_dir: Path, threads: int) -> Callable[[Sequence[int], int], Generation]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )

    def generate(token_ids: Sequence[int], max_tokens: int) -> Generation:
        prompt = torch.tensor([list(token_ids)])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        gaps = []
        for logits in output.logits:
            top = logits[0].float().topk(2).values
            gaps.append(float(top[0] - top[1]))
        return Generation(tuple(output.sequences[0, len(token_ids) :].tolist()), tuple(gaps))

    return generate


@dataclass(frozen=True, slots=True)
class NearTie:
    """A position where ours and the reference differ and rounding may decide."""

    prompt: str
    position: int
    gap: float
    ours: int
    reference: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A position where ours is wrong: the reference's choice was clear."""

    prompt: str
    position: int
    gap: float | None
    ours: int | None
    reference: int | None


def compare(
    name: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    max_tokens: int,
    eos_token_ids: Sequence[int],
    reference: Reference,
) -> tuple[list[NearTie], Mismatch | None]:
    """Compare our tokens with the reference, which is teacher-forced on ours after a near-tie."""
    ties: list[NearTie] = []
    done = 0
    while True:
        expected = reference.generate([*prompt, *ours[:done]], max_tokens - done)
        rest = ours[done:]
        differs = next(
            (
                i
                for i, pair in enumerate(zip(rest, expected.token_ids, strict=False))
                if pair[0] != pair[1]
            ),
            None,
        )
        if differs is None:
            if len(rest) == len(expected.token_ids):
                return ties, None
            at = min(len(rest), len(expected.token_ids))
            mine = rest[at] if at < len(rest) else None
            theirs = expected.token_ids[at] if at < len(expected.token_ids) else None
            return ties, Mismatch(name, done + at, None, mine, theirs)
        gap = expected.gaps[differs]
        mine, theirs = rest[differs], expected.token_ids[differs]
        if gap >= NEAR_TIE:
            return ties, Mismatch(name, done + differs, gap, mine, theirs)
        ties.append(NearTie(name, done + differs, gap, mine, theirs))
        done += differs + 1
        if done == max_tokens or mine in eos_token_ids:
            return ties, None
