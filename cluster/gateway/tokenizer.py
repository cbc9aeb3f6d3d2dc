"""What the gateway asks of a tokenizer, and the fast tokenizers of a Hugging Face folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as BackendTokenizer

from cluster.gateway.chat import ChatMessage, ChatTemplate, ChatTemplateError
from cluster.gateway.detokenizer import (
    ByteFallbackDecoder,
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
    byte_level_alphabet,
)
from cluster.gateway.tokenizer_files import read_tokenizer
from engine.model_pull import user_cache_dir

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer(Protocol):
    """Text to ids and back. Every method may be called from any thread.

    Ids are below `vocab_size`, which is never more than the model's. No token stands for more than
    `max_token_bytes` bytes of text.
    """

    vocab_size: int
    max_token_bytes: int
    special_token_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` adds what the tokenizer frames it in."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of all ids together."""
        ...

    def decoder(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        """Return a new decoder whose pieces joined equal `decode`."""
        ...

    def token_string(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token stands for; the bytes need not be whole characters."""
        ...

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool
    ) -> str:
        """Return the prompt for a conversation. Raises `ChatTemplateError`."""
        ...


class FastTokenizer:
    """A `Tokenizer` over a tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        backend: BackendTokenizer,
        *,
        vocab_size: int,
        chat_template: ChatTemplate | None,
    ) -> None:
        self.vocab_size = vocab_size
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        # As the vocabulary spells it, a token is never shorter than what it stands for.
        self.max_token_bytes = max(len(name.encode()) for name in backend.get_vocab())
        self._backend = backend
        self._chat_template = chat_template
        self._alphabet = byte_level_alphabet()
        parts = _decoder_parts(backend)
        kinds = [p["type"] for p in parts]
        self._byte_level = kinds == ["ByteLevel"]
        strips = [p for p in parts if p["type"] == "Strip"]
        self._byte_fallback = _is_byte_fallback(kinds, parts)
        self._num_stripped = int(str(strips[0]["start"])) if strips else 0
        self._bytes_of = lru_cache(maxsize=1 << 16)(self._compute_bytes)

    @classmethod
    def load(cls, folder: Path, cache_dir: Path | None = None) -> FastTokenizer:
        """Load the tokenizer of a model folder. Raises `ConfigError`.

        Only for one that `cache_dir`, by default the user's, does not know yet is transformers
        imported.
        """
        facts = read_tokenizer(folder, cache_dir or user_cache_dir() / "tokenizers")
        backend = facts.make_backend()
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text()) if config_file.exists() else {}
        text_config = config.get("text_config", config)
        source = facts.chat_template
        num_tokens = backend.get_vocab_size(with_added_tokens=True)
        return cls(
            backend,
            vocab_size=min(num_tokens, text_config.get("vocab_size", num_tokens)),
            chat_template=ChatTemplate(source, facts.special_tokens) if source else None,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer`."""
        # A batch of one: `encode` keeps the GIL, which for megabytes stops every stream.
        (made,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(made.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Tokenizer`."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decoder(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        """See `Tokenizer`."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        if self._byte_level:
            return ByteLevelDecoder(lambda i: b"" if i in hidden else self._bytes_of(i))
        if self._byte_fallback:
            return ByteFallbackDecoder(
                lambda i: "" if i in hidden else self._piece(i), self._num_stripped
            )
        return WindowDecoder(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_string(self, token_id: int) -> str:
        """See `Tokenizer`."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        return self._bytes_of(token_id)

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool
    ) -> str:
        """See `Tokenizer`."""
        if self._chat_template is None:
            raise ChatTemplateError("This model has no chat template.")
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, clock=time.monotonic
        )

    def _piece(self, token_id: int) -> str | bytes:
        token = self.token_string(token_id)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ")

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.token_string(token_id)
        if self._byte_level:
            if all(c in self._alphabet for c in token):
                return bytes(self._alphabet[c] for c in token)
            return token.encode()  # an added token is spelled as it is
        if self._byte_fallback:
            piece = self._piece(token_id)
            return piece if isinstance(piece, bytes) else piece.encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def _decoder_parts(backend: BackendTokenizer) -> list[dict[str, object]]:
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return []
    parts: list[dict[str, object]] = decoder.get("decoders", [decoder])
    return parts


def _is_byte_fallback(kinds: Sequence[object], parts: Sequence[dict[str, object]]) -> bool:
    """Whether the decoder is SentencePiece's: `▁` is a space, byte tokens, one strip at most."""
    expected = ["Replace", "ByteFallback", "Fuse"]
    if list(kinds) not in (expected, [*expected, "Strip"]):
        return False
    strip_is_plain = len(parts) == 3 or (parts[3]["content"] == " " and parts[3]["stop"] == 0)
    return parts[0]["pattern"] == {"String": "▁"} and parts[0]["content"] == " " and strip_is_plain
