"""From validated calls to what the cluster runs: token ids, block hashes, sampling parameters.

`Preparer` methods are CPU-bound and run in threads; they touch no shared state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from cluster.gateway.chat import ChatTemplateError
from cluster.gateway.errors import context_length_exceeded, invalid, text_too_long
from cluster.gateway.fields import check_integer, check_text
from cluster.gateway.tokenizer import Tokenizer
from cluster.gateway.validation import Options
from core.config import GatewayConfig
from core.hashing import HashRoot, extend_block_hashes
from core.ids import BlockHash
from core.requests import SamplingParams

_U64 = 1 << 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt. `text` is what `echo` shows."""

    text: str
    token_ids: tuple[int, ...]
    root: BlockHash
    block_hashes: tuple[BlockHash, ...]


class Preparer:
    """Tokenises and hashes for one model."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        hash_root: Callable[[str], HashRoot],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._root = lru_cache(maxsize=4096)(lambda salt: hash_root(salt).digest())

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        salt: str,
    ) -> Prompt:
        """Render and tokenise a conversation. Raises `ApiError`."""
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt
            )
        except ChatTemplateError as error:
            raise invalid("messages", str(error)) from error
        check_text("messages", text, len(text))
        # The template writes the special tokens itself.
        token_ids = self.encode("messages", text, add_special_tokens=False)
        return self._prompt("messages", text, token_ids, salt)

    def completion(self, prompt: str | tuple[int, ...], *, salt: str, echo: bool) -> Prompt:
        """Tokenise a plain prompt. Raises `ApiError`."""
        if isinstance(prompt, str):
            token_ids = self.encode("prompt", prompt, add_special_tokens=True)
            return self._prompt("prompt", prompt, token_ids, salt)
        text = self._tokenizer.decode(prompt, skip_special_tokens=False) if echo else ""
        return self._prompt("prompt", text, prompt, salt)

    def encode(self, param: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text that could fit the context. Raises `ApiError` for a longer one.

        Tokenising megabytes that can never be used would keep everybody else waiting.
        """
        limit, token_bytes = self._config.max_model_len, self._tokenizer.max_token_bytes
        num_bytes = len(text.encode())
        if num_bytes > limit * token_bytes:
            raise text_too_long(param, limit, -(-num_bytes // token_bytes))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _prompt(self, param: str, text: str, token_ids: Sequence[int], salt: str) -> Prompt:
        limit = self._config.max_model_len
        if not token_ids:
            raise invalid(param, f"`{param}` has no tokens.")
        if len(token_ids) >= limit:
            raise context_length_exceeded(param, limit, len(token_ids), 1)
        for token_id in token_ids:  # a tokenizer may know more ids than the model
            check_integer(param, token_id, 0, self._tokenizer.vocab_size - 1)
        root = self._root(salt)
        hashes = extend_block_hashes(root, token_ids, self._config.block_size)
        return Prompt(text, tuple(token_ids), root, tuple(hashes))

    def sampling(self, options: Options, num_prompt_tokens: int, param: str) -> SamplingParams:
        """Return the parameters of choice 0. Raises `ApiError` when they do not fit the context."""
        room = self._config.max_model_len - num_prompt_tokens
        max_tokens = room if options.max_tokens is None else options.max_tokens
        if max_tokens > room:
            raise context_length_exceeded(
                param, self._config.max_model_len, num_prompt_tokens, max_tokens
            )
        if options.min_tokens > max_tokens:
            raise invalid("min_tokens", f"`min_tokens` must be at most max_tokens ({max_tokens}).")
        eos = () if options.ignore_eos else self._eos_token_ids
        return SamplingParams(
            max_tokens=max(max_tokens, 1),  # an echo without output still runs the prompt
            min_tokens=options.min_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=min(options.top_k, self._tokenizer.vocab_size),
            min_p=options.min_p,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=options.logit_bias,
            bad_words=self._bad_words(options.bad_words),
            stop_token_ids=tuple(sorted({*options.stop_token_ids, *eos})),
            logprobs=options.logprobs,
            forced_token_ids=options.forced_token_ids,
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Spell each word as it stands at the start of a text and after a space."""
        spellings = {
            tuple(self._tokenizer.encode(text, add_special_tokens=False))
            for word in words
            for text in (word, " " + word.lstrip())
        }
        return tuple(sorted(s for s in spellings if s))


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Narrow a tenant's namespace by the client's own salt, never leaving it."""
    if not cache_salt:
        return tenant
    h = blake2b(digest_size=16, person=b"halfmoon-salt")
    for part in (tenant, cache_salt):
        h.update(len(part.encode()).to_bytes(4, "little") + part.encode())
    return h.hexdigest()


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice number `choice` of `n`, as u64.

    Choice 0 has the request's own seed, so that it equals the same request with `n` = 1. Others:
    BLAKE2b-64(seed as u64 LE || choice as u32 LE). Every prompt of a call has the same seeds.
    """
    if choice == 0:
        return seed % _U64
    raw = (seed % _U64).to_bytes(8, "little") + choice.to_bytes(4, "little")
    digest = blake2b(raw, digest_size=8, person=b"halfmoon-choice")
    return int.from_bytes(digest.digest(), "little")
