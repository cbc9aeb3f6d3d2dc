"""Predicted times: fitted profiles, corrected by what really happened, within bounds.

A correction is one factor per worker and phase. It follows the observed ratio smoothly, and no
single observation and no run of them can move it out of its bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import geometric_mean

from core.ids import Incarnation
from core.latency import LatencyProfile

UNKNOWN_PROFILE = LatencyProfile(
    "Llama-3.1-8B on one A100", 6.2, 0.0555, 2.95e-6, 11.9, 0.0, 8.87e-5
)
"""Stands in until a worker has a profile of its own; its corrections may then go far."""

FITTED_BOUND = 4.0
UNKNOWN_BOUND = 256.0
SMOOTHING = 0.2
"""Weight of a new observation."""

FADING = 0.1
"""Weight of the common factor at each report of an idle worker."""

OUTPUT_SMOOTHING = 0.05
MIN_SAMPLE_BYTES = 64 << 10
"""Smaller transfers tell latency, not bandwidth."""


@dataclass(slots=True)
class _Model:
    profile: LatencyProfile
    bound: float
    prefill_factor: float = 1.0
    decode_factor: float = 1.0

    def moved(self, factor: float, predicted_s: float, observed_s: float) -> float:
        """Move a factor towards observed/predicted, geometrically, within the bounds."""
        if predicted_s <= 0 or observed_s <= 0:
            return factor
        ratio = self._clamp(observed_s / predicted_s)
        return self._clamp(factor * (ratio / factor) ** SMOOTHING)

    def faded(self, factor: float, common: float) -> float:
        """Move a factor a little towards what is common, within the bounds."""
        return self._clamp(float(factor * (common / factor) ** FADING))

    def _clamp(self, factor: float) -> float:
        return min(self.bound, max(1 / self.bound, factor))


@dataclass(slots=True)
class Estimates:
    """Predictions for every worker and link. Unknown links get `link_bytes_per_s`."""

    link_bytes_per_s: float
    _models: dict[Incarnation, _Model] = field(default_factory=dict)
    _links: dict[tuple[Incarnation, Incarnation], float] = field(default_factory=dict)
    _output_tokens: float | None = None

    def add_worker(self, worker: Incarnation, profile: LatencyProfile | None) -> None:
        """Know a worker; the corrections stay while its profile does."""
        model = (
            _Model(UNKNOWN_PROFILE, UNKNOWN_BOUND)
            if profile is None
            else _Model(profile, FITTED_BOUND)
        )
        known = self._models.get(worker)
        if known is None or known.profile != model.profile:
            self._models[worker] = model

    def forget(self, peer: Incarnation) -> None:
        """Forget a worker, or the links of a pool node."""
        self._models.pop(peer, None)
        self._links = {pair: rate for pair, rate in self._links.items() if peer not in pair}

    def prefill_s(self, worker: Incarnation, new_tokens: int, cached_tokens: int) -> float:
        """Predict the time to compute a prompt alone."""
        model = self._models[worker]
        return model.profile.prefill_ms(new_tokens, cached_tokens) / 1e3 * model.prefill_factor

    def step_s(self, worker: Incarnation, num_sequences: int, context_tokens: int) -> float:
        """Predict the time of a decode step; `context_tokens` sums over the sequences."""
        model = self._models[worker]
        return model.profile.decode_ms(num_sequences, context_tokens) / 1e3 * model.decode_factor

    def transfer_s(self, source: Incarnation, target: Incarnation, num_bytes: int) -> float:
        """Predict the time to move bytes between two pool nodes."""
        return num_bytes / self._links.get((source, target), self.link_bytes_per_s)

    def output_tokens(self, num_new_tokens: int) -> int:
        """Predict how many of at most `num_new_tokens` will really come."""
        if self._output_tokens is None:
            return num_new_tokens
        return min(num_new_tokens, round(self._output_tokens))

    def observe_prefill(
        self, worker: Incarnation, new_tokens: int, cached_tokens: int, observed_s: float
    ) -> None:
        """Correct from a finished prefill."""
        model = self._models[worker]
        predicted_s = model.profile.prefill_ms(new_tokens, cached_tokens) / 1e3
        model.prefill_factor = model.moved(model.prefill_factor, predicted_s, observed_s)

    def observe_step(
        self, worker: Incarnation, num_sequences: int, context_tokens: int, observed_s: float
    ) -> None:
        """Correct from a reported decode step."""
        model = self._models[worker]
        predicted_s = model.profile.decode_ms(num_sequences, context_tokens) / 1e3
        model.decode_factor = model.moved(model.decode_factor, predicted_s, observed_s)

    def fade_prefill(self, worker: Incarnation, among: Iterable[Incarnation]) -> None:
        """Let what was seen of an idle worker fade towards what is seen of all that prefill.

        A worker that looked slow once is given no work, and so could never look better.
        """
        model = self._models[worker]
        common = geometric_mean(self._models[peer].prefill_factor for peer in among)
        model.prefill_factor = model.faded(model.prefill_factor, common)

    def fade_decode(self, worker: Incarnation, among: Iterable[Incarnation]) -> None:
        """See `fade_prefill`."""
        model = self._models[worker]
        common = geometric_mean(self._models[peer].decode_factor for peer in among)
        model.decode_factor = model.faded(model.decode_factor, common)

    def observe_link(
        self, source: Incarnation, target: Incarnation, num_bytes: int, seconds: float
    ) -> None:
        """Learn a link's bandwidth, smoothed; a small sample is ignored."""
        if num_bytes < MIN_SAMPLE_BYTES or seconds <= 0:
            return
        rate = num_bytes / seconds
        known = self._links.get((source, target), rate)
        self._links[(source, target)] = known + SMOOTHING * (rate - known)

    def observe_output(self, num_output_tokens: int) -> None:
        """Learn how long outputs are; an attempt that gave none tells nothing."""
        if num_output_tokens == 0:
            return
        known = self._output_tokens
        if known is None:
            known = float(num_output_tokens)
        self._output_tokens = known + OUTPUT_SMOOTHING * (num_output_tokens - known)


def reuse_break_even_bytes_per_s(
    *, prefix_tokens: int, hidden_size: int, gqa: int, value_bytes: int, flops_per_s: float
) -> float:
    """Return the bandwidth above which fetching a prefix beats computing it.

    B > G * 2ds / (gqa * (a*p*d + b*d^2)) with a = 4, b = 22 (Mooncake, FAST'25, section 2): KV
    bytes over the FLOPs that make them; the number of layers cancels.
    """
    d = hidden_size
    flops = 4 * prefix_tokens * d + 22 * d**2
    return flops_per_s * 2 * d * value_bytes / (gqa * flops)
