"""The model's thoughts, `<think>…</think>` at the start of a reply, apart from its answer.

Templates either leave the opening tag to the model or write it at the end of the prompt; then the reply begins inside. Line
breaks beside the tags belong to them, as the templates that write such turns back into a prompt have it.
"""

from collections.abc import Iterable

from services.router.text.marker import Marker
from twinflow.contracts.errors import BadRequest

OPEN, CLOSE = "<think>", "</think>"
NAMES = ("auto", "none", "think")
_SPACE = "\n"


def thinks(setting: str, templates: Iterable[str]) -> bool:
    """Whether replies have thoughts in tags; with "auto" the model's templates tell. Raises BadRequest for an unknown name."""
    if setting not in NAMES:
        raise BadRequest(f"reasoning_parser={setting!r}: expected one of {', '.join(NAMES)}", param="reasoning_parser")
    return setting == "think" or (setting == "auto" and any(CLOSE in t for t in templates))


def opened_by(prompt: str) -> bool:
    """Whether a rendered prompt ends with the opening tag."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Of one reply. All text comes back, as reasoning or as content, but for the tags and the line breaks beside them."""

    def __init__(self, inside: bool) -> None:
        """`inside`: the prompt has opened the thoughts already."""
        self._inside: bool | None = inside or None  # None = the reply has not shown yet how it begins
        self._close = Marker(CLOSE, _SPACE)
        self._start = ""
        self._fresh = True  # nothing but line breaks came since the last tag
        self._split = False

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and content in this piece of text."""
        if self._inside is None:
            text = self._look(text)
            if self._inside is None:
                return "", ""
        if not self._inside:
            return "", self._trimmed(text) if self._split else text
        reasoning, rest = self._close.push(self._trimmed(text))
        if rest is None:
            return reasoning, ""
        self._inside, self._fresh, self._split = False, True, True
        return reasoning, self._trimmed(rest)

    def finish(self) -> tuple[str, str]:
        if self._inside is None:
            start, self._start = self._start, ""
            return "", start
        return (self._close.finish().rstrip(_SPACE), "") if self._inside else ("", "")

    def _look(self, text: str) -> str:
        """Decides how the reply begins as soon as its first characters tell; returns what follows the tag, if any."""
        self._start += text
        begun = self._start.lstrip()
        if begun.startswith(OPEN):
            self._inside = True
            return begun[len(OPEN) :]
        if OPEN.startswith(begun):
            return ""
        self._inside = False
        return self._start

    def _trimmed(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip(_SPACE)
            self._fresh = not text
        return text
