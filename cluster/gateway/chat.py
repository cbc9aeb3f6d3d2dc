"""Chat templates: rendered in a sandbox, with bounds of time and size.

Same environment as `transformers` gives templates (`_compile_jinja_template`), so that they give
the same text. Rendering is generated piece by piece, which lets the bounds really stop it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import HalfmoonError

RENDER_TIMEOUT_S = 5.0
MAX_RENDERED_CHARS = 20_000_000

ChatMessage = Mapping[str, object]


class ChatTemplateError(HalfmoonError):
    """The template refused the messages, or took too long over them."""


class ChatTemplate:
    """A compiled template; thread-safe. `special_tokens` are names that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        self._template = env.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        clock: Callable[[], float],
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> str:
        """Return the prompt. Raises `ChatTemplateError`. `clock` is monotonic."""
        deadline_s = clock() + timeout_s
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS or clock() > deadline_s:
                    raise ChatTemplateError("The chat template took too long over the messages.")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The chat template refused the messages: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # A template is code: its faults over odd messages are the messages' faults.
            raise ChatTemplateError("The chat template cannot render the messages.") from error
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
