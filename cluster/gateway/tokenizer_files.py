"""What a model folder's tokenizer comes to, as transformers reads it, kept for later starts.

Which of the folder's files transformers takes, and what it adds to them, depends on the tokenizer's
class and the model's type. Its own result is kept instead of imitated: it takes seconds and
hundreds of MB to import transformers, and milliseconds to read what it came to the last time.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from core.errors import ConfigError

log = logging.getLogger(__name__)

_FORMAT = 1
"""Goes up whenever `_convert` or `TokenizerFacts` changes, so that nothing old is taken for new."""

_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A tokenizer without padding and truncation, and what belongs to it.

    `backend` is the JSON of the `tokenizers` library. `special_tokens` are names that the chat
    template may use, such as `bos_token`.
    """

    backend: str
    encode_special_tokens: bool
    chat_template: str | None
    special_tokens: dict[str, str]

    def make_backend(self) -> BackendTokenizer:
        """Return the tokenizer itself."""
        backend = BackendTokenizer.from_str(self.backend)
        backend.encode_special_tokens = self.encode_special_tokens
        return backend


def read_tokenizer(folder: Path, cache_dir: Path) -> TokenizerFacts:
    """Return the facts of a model folder's tokenizer. Raises `ConfigError`.

    They are kept in `cache_dir` by the contents of the files and the versions of the libraries.
    """
    kept = cache_dir / f"{_digest(folder)}.json"
    try:
        return TokenizerFacts(**json.loads(kept.read_bytes()))
    except FileNotFoundError:
        facts = _convert(folder)
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be used and is made anew: %s", kept, error)
        facts = _convert(folder)
    _keep(facts, kept)
    return facts


def _digest(folder: Path) -> str:
    """Return a digest of all that the result depends on."""
    digest = blake2b(digest_size=16)
    for part in (str(_FORMAT), version("transformers"), version("tokenizers")):
        digest.update(f"{part}\0".encode())
    for file in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
        if file.suffix in _SUFFIXES and file.is_file():
            content = blake2b(file.read_bytes(), digest_size=16).hexdigest()
            digest.update(f"{file.relative_to(folder)}\0{content}\0".encode())
    return digest.hexdigest()


def _convert(folder: Path) -> TokenizerFacts:
    # Imports torch as well: only for a tokenizer that has not been seen before.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: no usable tokenizer: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, BackendTokenizer):
        raise ConfigError(f"{folder}: only fast tokenizers (tokenizer.json) can be served")
    backend.no_padding()
    backend.no_truncation()
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerFacts(
        backend=backend.to_str(),
        encode_special_tokens=backend.encode_special_tokens,
        chat_template=template or None,
        special_tokens={
            k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)
        },
    )


def _keep(facts: TokenizerFacts, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(facts)))
        draft.replace(path)
    except OSError as error:
        # Only time is lost: the next start asks transformers again.
        log.warning("the tokenizer cannot be kept: %s", error)
