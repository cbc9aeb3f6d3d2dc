"""What a decode worker has to do, as the Conductor wants to know it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from core.messages.to_conductor import DecodeLoad, PrefillLoad
from decode.attempts import Attempt, Phase


def decode_load(live: Collection[Attempt], free_blocks: int, step_s: float) -> DecodeLoad:
    """Return the load of decoding; all that is not in the batch waits."""
    running = [a for a in live if a.phase is Phase.RUNNING]
    return DecodeLoad(
        num_waiting=len(live) - len(running),
        num_running=len(running),
        context_tokens=sum(a.num_computed for a in running),
        free_blocks=free_blocks,
        step_s=step_s,
    )


def prefill_load(live: Collection[Attempt], free_blocks: int) -> PrefillLoad:
    """Return a coupled worker's load of computing prompts."""
    unfinished = [a for a in live if a.num_computed < a.num_known]
    num_running = sum(a.phase is Phase.RUNNING for a in unfinished)
    return PrefillLoad(
        num_waiting=len(unfinished) - num_running,
        num_running=num_running,
        queued_tokens=sum(a.num_known - a.num_computed for a in unfinished),
        free_blocks=free_blocks,
    )
