"""One marker in a growing text: what comes before it is safe to show, what may be its start is held back."""


class Marker:
    """Feed text with `push` until the marker has come; at the text's end `finish` gives out what was held."""

    def __init__(self, marker: str, space: str) -> None:
        """`space`: characters that belong to the marker when they stand right before it, and are dropped with it."""
        self._marker = marker
        self._space = space
        self._held = ""
        self.dropped = ""  # the white space that was before the marker

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certainly outside, and what follows the marker, None when it has not come yet."""
        held = self._held + text
        at = held.find(self._marker)
        if at >= 0:
            self._held = ""
            before = held[:at].rstrip(self._space)
            self.dropped = held[len(before) : at]
            return before, held[at + len(self._marker) :]
        cut = len(held[: len(held) - self._begun(held)].rstrip(self._space))
        self._held = held[cut:]
        return held[:cut], None

    def finish(self) -> str:
        """The held text, which turned out to be no marker."""
        rest, self._held = self._held, ""
        return rest

    def _begun(self, held: str) -> int:
        """Characters at the end that may be the marker's start."""
        for n in range(min(len(self._marker) - 1, len(held)), 0, -1):
            if held.endswith(self._marker[:n]):
                return n
        return 0
