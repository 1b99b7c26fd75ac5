"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Lets text through up to the first stop string, which it swallows.

    The stop that begins earliest in the text wins, however the text is cut into pieces: text that may still
    become a stop is held back, and released when it does not.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped = False
        self.stop: str | None = None  # the stop string that was found

    @property
    def held(self) -> str:
        """The text held back."""
        return self._held

    def push(self, text: str) -> str:
        """Return the text that is safe to show; sets `stopped` once a stop is certain."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._earliest_match()
        pending = self._earliest_prefix()
        if found is not None and found[0] <= pending:
            return self._finish(*found)
        # A stop that begins before the one found may still become complete: wait for it.
        safe, self._held = self._held[:pending], self._held[pending:]
        return safe

    def finish(self) -> str:
        """The text has ended: return what was held back and is not part of a stop."""
        if self.stopped:
            return ""
        found = self._earliest_match()
        if found is not None:
            return self._finish(*found)
        rest, self._held = self._held, ""
        return rest

    def _finish(self, start: int, stop: str) -> str:
        safe, self._held = self._held[:start], ""
        self.stopped, self.stop = True, stop
        return safe

    def _earliest_match(self) -> tuple[int, str] | None:
        """Where the first complete stop begins, the longest of those that begin there."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start, -len(stop)) < (best[0], -len(best[1]))):
                best = start, stop
        return best

    def _earliest_prefix(self) -> int:
        """Where the first stop that is not complete yet could begin; the end of the text if nowhere."""
        first = len(self._held)
        for stop in self._stops:
            for start in range(max(0, len(self._held) - len(stop) + 1), first):
                if stop.startswith(self._held[start:]):
                    first = start
                    break
        return first
