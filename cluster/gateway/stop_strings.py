"""Stop strings over streamed text, and the output text that a client sees.

The result does not depend on how the text was cut into tokens: the stop string that is complete
first wins, the longest one if several end at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.gateway.detokenizer import IncrementalDecoder
from cluster.request_events import TextDelta


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string in fed text, by character offsets from the start of all text."""

    start: int
    end: int


class StopMatcher:
    """Knuth-Morris-Pratt for each stop string: O(1) amortised per character and string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)  # of those ending together, the longest
        self._borders = [_borders(s) for s in self._stops]
        self._matched = [0] * len(stops)
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> list[Match]:
        """Take the next characters and return the matches that end in them, first end first."""
        if not self._stops:
            return []
        matches = []
        for char in text:
            self._num_chars += 1
            for i, stop in enumerate(self._stops):
                if self._advance(i, char):
                    matches.append(Match(self._num_chars - len(stop), self._num_chars))
        return matches

    def _advance(self, i: int, char: str) -> bool:
        stop, borders, k = self._stops[i], self._borders[i], self._matched[i]
        while k and stop[k] != char:
            k = borders[k - 1]
        k += stop[k] == char
        complete = k == len(stop)
        self._matched[i] = borders[k - 1] if complete else k
        return complete


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    for i in range(1, len(stop)):
        k = borders[i - 1]
        while k and stop[k] != stop[i]:
            k = borders[k - 1]
        borders[i] = k + (stop[k] == stop[i])
    return borders


class ChoiceText:
    """The text of one choice: detokenised, with hold-back and cut at a stop string.

    Only output text is matched, never the prompt. A stop string counts when it is completed by
    output token number `min_tokens` (from 1) or a later one. What `push` and `finish` return,
    joined, is the text of the choice.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._pending = ""
        self._released = 0

    def push(self, token_id: int, *, ends_generation: bool) -> TextDelta:
        """See `cluster.request_events.OutputText`. A stop token's text shows with the stop."""
        self._num_tokens += 1
        if ends_generation and not self._include_stop:
            return TextDelta("", stopped=False)
        return self._take(self._decoder.push(token_id))

    def finish(self) -> TextDelta:
        """See `cluster.request_events.OutputText`."""
        delta = self._take(self._decoder.finish())
        rest, self._pending = self._pending, ""
        return TextDelta(delta.text + rest, delta.stopped)

    def _take(self, text: str) -> TextDelta:
        self._pending += text
        matches = self._matcher.feed(text)
        if matches and self._num_tokens >= self._min_tokens:
            end = matches[0].end if self._include_stop else matches[0].start
            # An ignored early match may overlap: what is released stays released.
            shown = self._pending[: max(0, end - self._released)]
            self._pending = ""
            return TextDelta(shown, stopped=True)
        num_free = len(self._pending) - self._matcher.num_held
        shown, self._pending = self._pending[:num_free], self._pending[num_free:]
        self._released += len(shown)
        return TextDelta(shown, stopped=False)
