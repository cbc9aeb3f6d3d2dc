"""The toy model at the speed of a real one: tokens are `ToyEngine`'s, time is a profile's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.latency import LatencyProfile, PrefillPart
from engine.base import LayerDone, ModelSpec, SequenceResult, SequenceStep
from engine.toy import ToyEngine

Sleep = Callable[[float], None]
"""Waits so many seconds. `time.sleep` in a live worker, a virtual clock elsewhere."""


class EmulatedEngine(ToyEngine):
    """A `ToyEngine` whose steps take as long as `profile` says, spread evenly over the layers.

    `sleep` is called once per layer, before `layer_done` of that layer, and nothing else waits.
    What the toy model itself needs comes on top: some microseconds a token.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, profile: LatencyProfile, sleep: Sleep
    ) -> None:
        super().__init__(spec, num_blocks)
        self._profile = profile
        self._sleep = sleep

    def step(
        self, sequences: Sequence[SequenceStep], layer_done: LayerDone | None = None
    ) -> list[SequenceResult]:
        """See `Engine.step`."""
        layer_s = step_duration_ms(self._profile, sequences) / 1000 / self.spec.num_layers

        def pace(layer: int) -> None:
            self._sleep(layer_s)
            if layer_done is not None:
                layer_done(layer)

        return super().step(sequences, pace)


def step_duration_ms(profile: LatencyProfile, sequences: Sequence[SequenceStep]) -> float:
    """Return what a step costs under a profile.

    A single token after others counts as decoding, with the whole context it attends to; all else
    is prefill. The last token of a prompt with everything before it cached costs the same as a
    decoded one, so the two need no telling apart.
    """
    decodes = [s for s in sequences if len(s.token_ids) == 1 and s.start > 0]
    prefills = [s for s in sequences if not (len(s.token_ids) == 1 and s.start > 0)]
    return profile.step_ms(
        [PrefillPart(len(s.token_ids), s.start) for s in prefills],
        num_decodes=len(decodes),
        context_tokens=sum(s.start + 1 for s in decodes),
    )
