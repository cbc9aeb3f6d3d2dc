"""What a request asks for and what comes back, independent of HTTP and of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a generation ended. The values are those of OpenAI's API where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by the gateway; workers trust it.

    `temperature` 0 is greedy. `top_k` 0 means no limit. `max_tokens` counts output tokens and is
    already cut to the context. `stop_token_ids` includes the model's own end tokens unless
    `ignore_eos`. Until `min_tokens` outputs exist, stop tokens cannot be sampled.
    `logprobs` is the number of alternatives reported beside the sampled token, `None` for none.
    `forced_token_ids` is the test hook of `--enable-forced-tokens`: output i is forced to it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    forced_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model, and its rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one position: the token that stands there, then the likeliest ones in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


def finish_reason(
    params: SamplingParams, num_output_tokens: int, last_token_id: int
) -> FinishReason | None:
    """Tell whether output token number `num_output_tokens` (from 1) ends the generation.

    Stop strings are the gateway's business: they need text.
    """
    if num_output_tokens >= params.min_tokens and last_token_id in params.stop_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH
    return None
