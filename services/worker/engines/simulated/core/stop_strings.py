"""Where an answer ends because of what it says."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may be the beginning of a stop string, as vLLM's detokenizer does."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held_back = max(map(len, stops)) - 1
        self._pending = ""
        self.matched = ""
        """The stop string that was found; then the answer is over."""

    def feed(self, text: str, *, last: bool = False) -> str:
        """More text; returns what may be shown. ``last``: nothing follows, so nothing needs to be held back."""
        self._pending += text
        found = min(((at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            shown, self._pending = self._pending[: at + len(self.matched) * self._include], ""
            return shown
        split = len(self._pending) if last else max(0, len(self._pending) - self._held_back)
        shown, self._pending = self._pending[:split], self._pending[split:]
        return shown
