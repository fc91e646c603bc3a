"""Stop strings over a growing text: never give out a character that may belong to one."""

from collections.abc import Sequence


class StopMatcher:
    """Feed text with `push`; what it returns is safe to send. After a match `matched` holds the stop string, the text
    before it has been given out, and nothing more follows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: pair[0])
            safe, self._held = self._held[:at], ""
            return safe
        cut = len(self._held) - self._held_chars()
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        """The held text, which turned out to be no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _held_chars(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for n in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-n:]
            if any(s.startswith(end) for s in self._stops):
                return n
        return 0
