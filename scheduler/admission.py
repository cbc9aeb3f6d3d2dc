"""Whether a predicted placement is good enough to be made."""

from __future__ import annotations

from dataclasses import dataclass

MIN_RETRY_S = 1.0
MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Overload:
    """Why not now, and when to ask again."""

    reason: str
    retry_after_s: float


def check_overload(
    *, ttft_s: float, tbt_s: float, ttft_slo_s: float | None, tbt_slo_s: float | None
) -> Overload | None:
    """Compare predictions with the objectives; `None` means admit, and a limit of `None` admits.

    A TTFT too long by x seconds needs x seconds of the queue to be done. How long a batch stays
    too large is not known, so for TBT the shortest pause is named.
    """
    if ttft_slo_s is not None and ttft_s > ttft_slo_s:
        retry_after_s = min(MAX_RETRY_S, max(MIN_RETRY_S, ttft_s - ttft_slo_s))
        return Overload(f"predicted TTFT {ttft_s:.3g} s is over {ttft_slo_s:.3g} s", retry_after_s)
    if tbt_slo_s is not None and tbt_s > tbt_slo_s:
        return Overload(f"predicted TBT {tbt_s:.3g} s is over {tbt_slo_s:.3g} s", MIN_RETRY_S)
    return None
