"""Turns book text into chats: "Continue the story: …", "Tell me a story about …", and follow-ups. Feeds chats.py.

The answer is always the author's own next sentences, so chat answers read as fluently as the books. It stops where a
sentence does, which teaches the model to stop.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

CONTINUE = (
    "Continue the story: {}",
    "Continue this story: {}",
    "Continue this text: {}",
    "Please continue: {}",
    "Continue the following passage:\n\n{}",
    "What happens next? {}",
    "Go on with this story:\n\n{}",
    "Write the next part of this story: {}",
    "Finish this: {}",
    "{}\n\nContinue.",
)
TELL = (
    "Tell me a story about {}.",
    "Tell me a story about {}",
    "Write a story about {}.",
    "Write a short story about {}.",
    "I would like to hear about {}.",
    "Can you tell me a story about {}?",
    "Tell me about {}.",
)
TELL_ANY = ("Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell me a story?")
MORE = ("Go on.", "Continue.", "What happened next?", "And then?", "Tell me more.", "Please go on.")
SYSTEMS = ("You are a helpful assistant.", "You are a storyteller.", "You tell stories.", "Answer the user.")

SENTENCE_END = re.compile(r"[.!?][\"')]*(?=\s|$)")
# An article, a word, and something that usually follows a noun; adjectives and ordinals are mostly left out this way.
NOUN_PHRASE = re.compile(
    r"\b(?:an?|the) (?!(?:other|same|first|last|next|following|whole|story|former|latter)\b)[a-z]{4,}(?<!est)(?<!ing)"
    r"(?=[,.;:!?]| (?:of|that|who|which|and|in|was|is|had|with|on|to|at|from|came|went|were|stood|lay|said)\b)"
)
OPENING = re.compile(r"(Once|There (was|were|lived)|One |The |A |An |In |It was|On |Many|When |At )")
ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Dr|St|Ms|Esq|No|vol|etc)|\b[A-Z])\.$")


def paragraphs(text: str) -> list[str]:
    """Running prose only: headings, verse and tables of contents have short or unfinished lines."""
    joined = (re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text))
    return [p for p in joined if len(p) > 30 and p[-1] in ".!?\"'" and not p.isupper() and p[0] not in "#-*|["]


def sentences(paragraph: str) -> list[str]:
    parts, start = [], 0
    for match in SENTENCE_END.finditer(paragraph):
        if not ABBREVIATION.search(paragraph[start : match.end()]):
            parts.append(paragraph[start : match.end()].strip())
            start = match.end()
    if tail := paragraph[start:].strip():
        parts.append(tail)
    return parts


class StoryMaker:
    """Draws chats from one book. Deterministic for a given `rng`."""

    def __init__(self, text: str, rng: random.Random) -> None:
        self._rng = rng
        kept = paragraphs(text)
        self._sentences = [(s, i) for i, p in enumerate(kept) for s in sentences(p)]  # (text, paragraph number)
        starts = [k for k, (_, i) in enumerate(self._sentences) if k == 0 or self._sentences[k - 1][1] != i]
        self._openings = [k for k in starts if OPENING.match(self._sentences[k][0])]
        self._phrases = Counter(p for text, _ in self._sentences for p in NOUN_PHRASE.findall(text))

    @property
    def empty(self) -> bool:
        return len(self._sentences) < 30

    def draw(self) -> list[dict[str, Any]]:
        rng = self._rng
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.2 else []
        if self._openings and rng.random() < 0.3:
            answer, at = self._take(rng.choice(self._openings), rng.randint(45, 130))
            messages += _turn(self._tell(answer), answer)
        else:
            passage, at = self._take(rng.randrange(len(self._sentences) - 20), rng.randint(8, 110))
            answer, at = self._take(at, rng.randint(35, 130))
            if rng.random() < 0.3:  # cut the passage inside its last sentence: the answer picks up in mid-sentence
                passage, answer = _cut(passage, answer, rng)
            messages += _turn(rng.choice(CONTINUE).format(passage), answer)
        while rng.random() < 0.2 and at < len(self._sentences) - 20:
            answer, at = self._take(at, rng.randint(35, 110))
            messages += _turn(rng.choice(MORE), answer)
        return messages

    def _take(self, at: int, words: int) -> tuple[str, int]:
        """Whole sentences from index `at` until about `words` words; returns the text and the next index."""
        text, count = "", 0
        while at < len(self._sentences) and (not text or count < words):
            sentence, paragraph = self._sentences[at]
            joint = "" if not text else " " if paragraph == self._sentences[at - 1][1] else "\n\n"
            text += joint + sentence
            count += sentence.count(" ") + 1
            at += 1
        return text, at

    def _tell(self, answer: str) -> str:
        """Asks for the rarest thing (in this book) that the answer mentions early, as a child would ask for it."""
        phrases: Sequence[str] = NOUN_PHRASE.findall(answer[:400])
        if not phrases or self._rng.random() < 0.15:
            return self._rng.choice(TELL_ANY)
        rarest = sorted(set(phrases), key=lambda p: (self._phrases[p], p))[:3]
        return self._rng.choice(TELL).format(self._rng.choice(rarest))


def _cut(passage: str, answer: str, rng: random.Random) -> tuple[str, str]:
    words = passage.split(" ")
    keep = max(3, len(words) - rng.randint(1, 12))
    rest = " ".join(words[keep:]).strip()
    return (" ".join(words[:keep]).strip(), f"{rest} {answer}") if rest else (passage, answer)


def _turn(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
