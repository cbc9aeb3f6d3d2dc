"""How long a step takes: the linear formulas that profiles of engines share.

Used to *generate* time (emulated engine, simulator) and, with other coefficients, to *predict* it
(Conductor); the two never share one object. All times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """One member of a prefill batch: `new_tokens` computed after `cached_tokens` in the cache."""

    new_tokens: int
    cached_tokens: int = 0

    @property
    def token_pairs(self) -> float:
        """Query-key pairs attended to: p*m + m^2/2."""
        return self.cached_tokens * self.new_tokens + self.new_tokens**2 / 2


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Coefficients of one engine on one device; `name` is for people.

    With m new and p cached tokens, B sequences with S tokens of context in all:

    - prefill = a + b*m + c*(p*m + m^2/2); a batch sums m and the pair term and pays one a
    - decode step = a + b*B + c*S
    - a mixed step sums both and pays the decode a alone

    Raises `ValueError` for a coefficient that is negative or not finite.
    """

    name: str
    prefill_base_ms: float
    prefill_token_ms: float
    prefill_pair_ms: float
    decode_base_ms: float
    decode_sequence_ms: float
    decode_context_token_ms: float

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if isinstance(value, float | int) and not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")

    def prefill_ms(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Time to prefill one prompt alone; 0 when there is nothing to compute."""
        return self.prefill_batch_ms([PrefillPart(new_tokens, cached_tokens)])

    def prefill_batch_ms(self, parts: Iterable[PrefillPart]) -> float:
        """Time of one batch or chunk; 0 when no member has anything to compute."""
        work_ms = self._prefill_work_ms(parts)
        return self.prefill_base_ms + work_ms if work_ms is not None else 0.0

    def decode_ms(self, num_sequences: int, context_tokens: int) -> float:
        """Time of one decode step; `context_tokens` is summed over the batch. 0 if empty."""
        return self.step_ms((), num_sequences, context_tokens)

    def step_ms(self, parts: Iterable[PrefillPart], num_decodes: int, context_tokens: int) -> float:
        """Time of any step: prefill alone, decode alone, both mixed, or nothing (0)."""
        work_ms = self._prefill_work_ms(parts)
        if num_decodes == 0:
            return self.prefill_base_ms + work_ms if work_ms is not None else 0.0
        return (
            self.decode_base_ms
            + self.decode_sequence_ms * num_decodes
            + self.decode_context_token_ms * context_tokens
            + (work_ms or 0.0)
        )

    def to_json(self) -> dict[str, str | float]:
        """Return the fields as a JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> LatencyProfile:
        """Undo `to_json`. Raises `ValueError` for missing, unknown or wrongly typed fields."""
        expected = {field.name for field in fields(cls)}
        if raw.keys() != expected:
            wrong = ", ".join(sorted(raw.keys() ^ expected))
            raise ValueError(f"missing or unknown fields in a latency profile: {wrong}")
        values: dict[str, float] = {}
        for name in expected - {"name"}:
            value = raw[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            values[name] = float(value)
        return cls(name=str(raw["name"]), **values)

    def _prefill_work_ms(self, parts: Iterable[PrefillPart]) -> float | None:
        """Sum the token and pair terms; None when there is no token to compute."""
        work = [part for part in parts if part.new_tokens]
        if not work:
            return None
        return sum(
            self.prefill_token_ms * part.new_tokens + self.prefill_pair_ms * part.token_pairs
            for part in work
        )
