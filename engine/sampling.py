"""Sampling: a pure function of the logits and of each request's own state.

Every row is worked on alone, on the host and in float64, so that a request gets the same token by
itself, in any batch and on any worker. The order is vLLM's: logit bias, penalties, bans (bad
words, stop tokens before `min_tokens`), temperature, min-p, top-k, top-p. Ties go to the lower
token id everywhere, so `top_k=1` is greedy.

The one random number of a position is counter-based, `uniform(seed, position)`, and the token is
found by inverting the distribution function in the order of token ids: small differences between
two machines' logits move the edges a little and never reorder them.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from core.requests import PositionLogprobs, SamplingParams, TokenLogprob
from engine.base import SampleRequest

Row = npt.NDArray[np.float64]

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Below this a temperature means greedy, as in vLLM: dividing by it would over- or underflow."""

LARGEST_SCORE = 1e300
"""Penalised scores stay within this, so that their differences stay finite over any temperature."""


def sample(
    logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> list[tuple[int, PositionLogprobs | None]]:
    """Choose the next token of each request from its row of `logits`, float32 `[rows, vocab]`.

    `logits` is not changed. Logprobs, where asked for, are the log-softmax of the *raw* logits,
    before bias, penalties and temperature (vLLM's default, `raw_logprobs`). Raises `ValueError`
    when rows and requests differ in number.
    """
    if logits.shape[0] != len(requests):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} requests")
    likeliest = _argmax(logits)
    wanted = [i for i, request in enumerate(requests) if _needs_row(request)]
    rows = dict(zip(wanted, _host_rows(logits, wanted), strict=True))
    results: list[tuple[int, PositionLogprobs | None]] = []
    for i, request in enumerate(requests):
        raw = rows.get(i)
        token_id = likeliest[i] if raw is None else _choose(raw, request)
        num_top = request.params.logprobs
        logprobs = None
        if raw is not None and num_top is not None:
            logprobs = position_logprobs(raw, token_id, num_top)
        results.append((token_id, logprobs))
    return results


def prompt_logprobs(
    logits: torch.Tensor, next_token_ids: Sequence[int], num_top: int
) -> tuple[PositionLogprobs, ...]:
    """Logprobs of each known next token, row by row of `logits`, float32 `[rows, vocab]`.

    Rows past the end of `next_token_ids` are left out. Raw logits, as in `sample`.
    """
    rows = _host_rows(logits, range(len(next_token_ids)))
    return tuple(
        position_logprobs(row, token_id, num_top)
        for row, token_id in zip(rows, next_token_ids, strict=True)
    )


def position_logprobs(raw: Row, token_id: int, num_top: int) -> PositionLogprobs:
    """Log-softmax of one row of raw logits at `token_id` and at its `num_top` likeliest tokens."""
    shifted = raw - raw.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = _largest(raw, num_top)
    return PositionLogprobs(
        chosen=TokenLogprob(token_id, float(logprobs[token_id]), _rank(raw, token_id)),
        top=tuple(
            TokenLogprob(int(other), float(logprobs[other]), rank)
            for rank, other in enumerate(top, start=1)
        ),
    )


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one output position (from 0) under a seed.

    53 bits of BLAKE2b over (seed mod 2^64, position): no state, so any worker can go on anywhere.
    """
    counter = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(counter, digest_size=8, person=b"halfmoon-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _argmax(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row, on the logits' device."""
    if not len(logits):
        return []
    best = logits.max(dim=-1)
    # NaN counts as the maximum, so it shows here; only then is a cleaned copy worth its time.
    if bool(best.values.isnan().any()):
        return _finite(logits).argmax(dim=-1).tolist()
    return best.indices.tolist()


def _needs_row(request: SampleRequest) -> bool:
    """Tell whether more than the row's argmax is needed."""
    params, position = request.params, len(request.output_token_ids)
    return (
        params.temperature >= GREEDY_BELOW_TEMPERATURE
        or params.logprobs is not None
        or position < len(params.forced_token_ids)
        or position < params.min_tokens
        or bool(params.logit_bias or params.bad_words)
        or _penalised(params)
    )


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _host_rows(logits: torch.Tensor, indices: Sequence[int]) -> list[Row]:
    """Copy rows to the host as float64, every value finite."""
    if not indices:
        return []
    picked = logits.detach()[list(indices)].to("cpu")
    return list(_finite(picked).to(torch.float64).numpy())


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Replace a model's mask (-inf) and a broken model's NaN by the lowest number there is."""
    return logits.nan_to_num(nan=torch.finfo(logits.dtype).min)


def _choose(raw: Row, request: SampleRequest) -> int:
    """Pick the next token of one request from its raw logits."""
    params, position = request.params, len(request.output_token_ids)
    if position < len(params.forced_token_ids):
        return params.forced_token_ids[position]
    scores = _ban(_penalise(_bias(raw, params), request), request)
    if params.temperature < GREEDY_BELOW_TEMPERATURE:
        return int(scores.argmax())
    weights = np.exp((scores - scores.max()) / params.temperature)
    candidates = np.flatnonzero(weights)
    weights = weights[candidates]
    kept = _truncate(weights, params)
    return _invert(candidates[kept], weights[kept], uniform(params.seed, position))


def _bias(raw: Row, params: SamplingParams) -> Row:
    """Add the logit bias to a copy of the row."""
    scores = raw.copy()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    return scores


def _penalise(scores: Row, request: SampleRequest) -> Row:
    """Apply the penalties in place, with vLLM's meaning.

    Repetition divides positive and multiplies negative scores of tokens in prompt or output; the
    other two look at the output alone: frequency per occurrence, presence once.
    """
    params = request.params
    if not _penalised(params):
        return scores
    output = np.asarray(request.output_token_ids, dtype=np.int64)
    seen = np.union1d(np.asarray(request.prompt_token_ids, dtype=np.int64), output)
    values = scores[seen]
    repetition = params.repetition_penalty
    with np.errstate(over="ignore"):
        penalised = np.where(values > 0, values / repetition, values * repetition)
    scores[seen] = penalised.clip(-LARGEST_SCORE, LARGEST_SCORE)
    used, counts = np.unique(output, return_counts=True)
    scores[used] -= params.frequency_penalty * counts + params.presence_penalty
    return scores


def _ban(scores: Row, request: SampleRequest) -> Row:
    """Make impossible what must not be sampled; if that is everything, the bans are void."""
    banned = _banned_token_ids(request)
    if not banned:
        return scores
    allowed = scores.copy()
    allowed[list(banned)] = -np.inf
    return allowed if np.isfinite(allowed).any() else scores


def _banned_token_ids(request: SampleRequest) -> set[int]:
    """Stop tokens before `min_tokens`, and last tokens of bad words whose rest stands already.

    A bad word may begin in the prompt.
    """
    params = request.params
    banned: set[int] = set()
    if len(request.output_token_ids) < params.min_tokens:
        banned.update(params.stop_token_ids)
    longest = max((len(word) for word in params.bad_words), default=0)
    if longest:
        tail = _tail(request, longest - 1)
        for word in params.bad_words:
            head = word[:-1]
            if word and len(head) <= len(tail) and head == tail[len(tail) - len(head) :]:
                banned.add(word[-1])
    return banned


def _tail(request: SampleRequest, length: int) -> tuple[int, ...]:
    """Return the last `length` tokens of prompt and output together, fewer if there are fewer."""
    output = tuple(request.output_token_ids[max(0, len(request.output_token_ids) - length) :])
    missing = length - len(output)
    prompt = request.prompt_token_ids
    return tuple(chain(prompt[max(0, len(prompt) - missing) :], output)) if missing else output


def _truncate(weights: Row, params: SamplingParams) -> npt.NDArray[np.intp]:
    """Return the indices, ascending, that min-p, top-k and top-p leave; never none.

    `weights` are unnormalised probabilities, all positive, the largest being 1.
    """
    kept = np.flatnonzero(weights >= params.min_p)
    if 0 < params.top_k < len(kept):
        among = weights[kept]
        kept = kept[_down_to(among, _nth_largest(among, params.top_k), params.top_k)]
    if params.top_p < 1.0:
        kept = kept[_nucleus(weights[kept], params.top_p)]
    return kept


def _nucleus(weights: Row, top_p: float) -> npt.NDArray[np.intp]:
    """Return the indices, ascending, of the fewest largest weights that hold `top_p` of the sum."""
    total = weights.sum()
    # What lies below this share holds at most 1 - top_p in all, so only the rest needs sorting.
    share = total * (1.0 - top_p) / len(weights)
    likely = np.flatnonzero(weights > share * (1.0 - 1e-9))
    descending = np.sort(weights[likely])[::-1]
    count = int(np.searchsorted(np.cumsum(descending), top_p * total)) + 1
    count = min(count, len(descending))
    return _down_to(weights, descending[count - 1], count)


def _down_to(values: Row, lowest: float, count: int) -> npt.NDArray[np.intp]:
    """Return the indices, ascending, of the `count` largest values, the last being `lowest`."""
    above = np.flatnonzero(values > lowest)
    tied = np.flatnonzero(values == lowest)[: count - len(above)]
    return np.sort(np.concatenate([above, tied]))


def _invert(candidates: npt.NDArray[np.intp], weights: Row, chance: float) -> int:
    """Return the candidate in whose share of the cumulated weights `chance` falls."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, chance * cumulated[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])


def _largest(values: Row, count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `count` largest values, in order, lower index first in a tie."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, dtype=np.intp)
    likely = np.flatnonzero(values >= _nth_largest(values, count))
    return likely[np.argsort(-values[likely], kind="stable")][:count]


def _nth_largest(values: Row, count: int) -> float:
    """Return the value at place `count`, from 1, in descending order."""
    place = len(values) - count
    return float(np.partition(values, place)[place])


def _rank(values: Row, index: int) -> int:
    """Return the place of `index` in the order of `_largest`, from 1."""
    value = values[index]
    return 1 + int((values > value).sum()) + int((values[:index] == value).sum())
