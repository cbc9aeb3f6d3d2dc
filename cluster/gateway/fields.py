"""Reading a JSON body field by field: types, bounds, and errors that name the field.

One rule for all fields: absent and null mean the default; a wrong type or a value out of bounds is
400 and names the field; fields that nobody read are unknown, ignored and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn

from cluster.gateway.errors import ApiError, invalid, unsupported

_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A string, also one that never ends, or a bracket. Possessive: nothing is looked at twice."""


def parse_json(raw: bytes, max_depth: int) -> dict[str, object]:
    """Parse a request body. Raises `ApiError`: NaN and Infinity are not JSON, nor is deep nesting.

    Linear in the size of `raw`.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ApiError(400, "The body is not UTF-8.") from None
    depth = 0
    for match in _STRUCTURE.finditer(text):
        mark = match[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > max_depth:
            raise ApiError(400, f"The body is nested more than {max_depth} levels deep.")
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not valid JSON.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Fields:
    """The fields of one object, each read at most once by name."""

    def __init__(self, body: Mapping[str, object], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._read: set[str] = set()

    def unknown(self) -> list[str]:
        """Return the fields that nobody asked for."""
        return [name for name in self._body if name not in self._read]

    def path(self, name: str) -> str:
        """Return the name that errors use."""
        return self._prefix + name

    def get(self, name: str) -> object:
        """Return the raw value, `None` for absent and null."""
        self._read.add(name)
        return self._body.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer within the bounds. Booleans and floats are none."""
        value = self.get(name)
        if value is None:
            return None
        return check_integer(self.path(name), value, low, high)

    def number(
        self, name: str, default: float, low: float, high: float, *, above: bool = False
    ) -> float:
        """Return a finite number within the bounds; `above` excludes the lower one."""
        value = self.get(name)
        if value is None:
            return default
        return check_number(self.path(name), value, low, high, above=above)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.path(name), f"`{self.path(name)}` must be true or false.")
        return value

    def text(self, name: str, max_chars: int) -> str | None:
        """Return a string of bounded length."""
        value = self.get(name)
        if value is None:
            return None
        return check_text(self.path(name), value, max_chars)

    def items(self, name: str, max_items: int) -> list[object]:
        """Return an array of bounded length; absent and null are empty."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid(self.path(name), f"`{self.path(name)}` must be an array.")
        if len(value) > max_items:
            raise invalid(
                self.path(name), f"`{self.path(name)}` may have at most {max_items} entries."
            )
        return value

    def mapping(self, name: str, max_items: int) -> dict[str, object] | None:
        """Return an object of bounded size."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(self.path(name), f"`{self.path(name)}` must be an object.")
        if len(value) > max_items:
            raise invalid(
                self.path(name), f"`{self.path(name)}` may have at most {max_items} entries."
            )
        return value

    def refuse_unless(self, name: str, *allowed: object) -> None:
        """Refuse a known field that is not supported, unless it is null or one of `allowed`."""
        value = self.get(name)
        if value is not None and not any(_same(value, a) for a in allowed):
            raise unsupported(self.path(name))


def _same(value: object, allowed: object) -> bool:
    """Equality without Python's `True == 1`; `1.0` is the same number as `1`."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def check_integer(path: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an integer within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(path, f"`{path}` must be an integer.")
    if not low <= value <= high:
        raise invalid(path, f"`{path}` must be between {low} and {high}.")
    return value


def check_number(
    path: str, value: object, low: float, high: float, *, above: bool = False
) -> float:
    """Return `value` if it is a finite number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(path, f"`{path}` must be a number.")
    in_bounds = low <= value <= high and not (above and value == low)
    if not in_bounds or not math.isfinite(value):
        lower = "greater than" if above else "at least"
        raise invalid(path, f"`{path}` must be {lower} {low:g} and at most {high:g}.")
    return float(value)


def check_text(path: str, value: object, max_chars: int) -> str:
    """Return `value` if it is a string of bounded length that is valid Unicode."""
    if not isinstance(value, str):
        raise invalid(path, f"`{path}` must be a string.")
    if len(value) > max_chars:
        raise invalid(path, f"`{path}` may have at most {max_chars} characters.")
    if any("\ud800" <= c <= "\udfff" for c in value) if not value.isascii() else False:
        raise invalid(path, f"`{path}` holds half a surrogate pair.")
    return value
