"""Stop strings: finds where an answer's ids end when its text meets one, whatever the token boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_modelkit.tokenizer import TextCodec

# Extra ids looked at before the longest stop string's: a cut multi-byte character needs up to four.
_SLACK = 8


class StopMatcher:
    """Looks for stop strings in the text of sampled ids."""

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._codec = codec
        self._stops = [stop for stop in stops if stop]
        # An id stands for at least one byte, so a stop string spans at most this many ids.
        self.held_back = max((len(stop.encode()) for stop in self._stops), default=0)
        self.window = self.held_back + _SLACK

    def hit(self, tail: Sequence[int]) -> bool:
        """Whether the last `window` ids hold a stop string; cheap enough for every token."""
        text = self._text(tail)
        return any(stop in text for stop in self._stops)

    def kept(self, ids: Sequence[int]) -> int | None:
        """Number of ids before the first stop string, or None while there is none.

        An id whose text reaches into the stop string is cut with it.
        """
        text = self._text(ids)
        starts = [found for stop in self._stops if (found := text.find(stop)) >= 0]
        if not starts:
            return None
        start = min(starts)
        kept = len(ids)
        while kept and len(self._text(ids[:kept])) > start:
            kept -= 1
        return kept

    def _text(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=False)


class StopMatchers:
    """One matcher for each set of stop strings."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._made: dict[tuple[str, ...], StopMatcher] = {}

    def of(self, stops: tuple[str, ...]) -> StopMatcher | None:
        """The matcher of these strings; None for none."""
        if stops and stops not in self._made:
            self._made[stops] = StopMatcher(self._codec, stops)
        return self._made.get(stops)
