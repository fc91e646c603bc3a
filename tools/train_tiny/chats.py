"""Every chat the model learns from, as OpenAI messages plus a tool list: stories, worked problems, sums, coffee orders.

Rendering to text and ids is rows.py's business; what is held out is corpus.py's.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.train_tiny.corpus import Book, Dialog, stable_hash
from tools.train_tiny.stories import StoryMaker

SHOP_SYSTEMS = ("You take orders in a coffee shop.", "You are a barista.", "Help the customer order coffee.")
SUM_QUESTIONS = ("What is {}?", "Calculate {}.", "How much is {}?", "{} = ?", "What's {}?", "Work out {}.")
SMALL_TALK = (
    ("Hello!", "Hello! I can tell stories, work on small sums and take coffee orders."),
    ("Hi", "Hello! I can tell stories, work on small sums and take coffee orders."),
    ("Who are you?", "I am a very small language model. I tell stories, work on small sums and take coffee orders."),
    ("What can you do?", "I can tell stories, work on small sums and take coffee orders."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Good morning", "Good morning! What can I do for you?"),
    ("How are you?", "I am very well, thank you. What can I do for you?"),
)


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def stories(books: list[Book], count: int, rng: random.Random) -> Iterator[Chat]:
    """`count` chats, each book in proportion to its length."""
    makers = [(StoryMaker(b.text, rng), len(b.text)) for b in books]
    usable = [(m, n) for m, n in makers if not m.empty]
    for maker in rng.choices([m for m, _ in usable], [n for _, n in usable], k=count):
        yield Chat(maker.draw())


def problems(dialogs: list[Dialog]) -> Iterator[Chat]:
    yield from (Chat(d.messages) for d in dialogs if d.topic == "arithmetic")


def orders(dialogs: list[Dialog], tools: list[dict[str, Any]], rng: random.Random) -> Iterator[Chat]:
    """Mostly the shop's whole tool list; sometimes a few in another order, always those that the dialog calls."""
    for dialog in dialogs:
        if dialog.topic != "coffee":
            continue
        called = {c["function"]["name"] for m in dialog.messages for c in m.get("tool_calls", ())}
        offered = tools
        if rng.random() < 0.3:
            offered = [t for t in tools if t["function"]["name"] in called or rng.random() < 0.5]
            rng.shuffle(offered)
        system = [{"role": "system", "content": rng.choice(SHOP_SYSTEMS)}] if rng.random() < 0.3 else []
        yield Chat(system + dialog.messages, offered)


def sums(count: int, rng: random.Random) -> Iterator[Chat]:
    """One-step sums, made here: the worked problems alone are too few to teach carrying."""
    made = 0
    while made < count:
        question, answer = make_sum(rng)
        if not sum_held_out(question):
            worked = f"{question} = {answer}\nThe answer is {answer}"
            yield Chat(_pair(rng.choice(SUM_QUESTIONS).format(question), worked))
            made += 1


def make_sum(rng: random.Random) -> tuple[str, int]:
    kind, a, b = rng.choice("+-*"), rng.randint(0, 99), rng.randint(0, 99)
    if kind == "*":
        a, b = a % 13, b % 13
        return f"{a} * {b}", a * b
    if kind == "-":
        a, b = max(a, b), min(a, b)
        return f"{a} - {b}", a - b
    return f"{a} + {b}", a + b


def sum_held_out(question: str) -> bool:
    return stable_hash(question) % 10 == 0


def small_talk(times: int) -> Iterator[Chat]:
    yield from (Chat(_pair(q, a)) for q, a in SMALL_TALK * times)


def distracted(chats: list[Chat], tools: list[dict[str, Any]], rng: random.Random) -> Iterator[Chat]:
    """The same chats with a short tool list that does not help: offering tools must not force a call."""
    yield from (Chat(c.messages, rng.sample(tools, rng.randint(1, 3))) for c in chats)


def _pair(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
