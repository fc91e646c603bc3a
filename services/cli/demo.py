"""`twinflow demo`: a cluster on this machine, a conversation through the official `openai` client, and what it moved.

Four requests show the cache at work: a long prompt that nobody knows; the second turn of the same conversation; a different
question that shares the long prefix; and one more sibling of that one.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.cli import story
from services.cli.cluster import Cluster, NotReady
from services.cli.console import Console, fail
from services.cli.demo_table import Measured, table
from services.cli.memory import memory_bytes
from services.cli.process import ProcessDied
from services.cli.topology import ClusterSettings, plan, with_model_here
from services.cli.up import stop_signals

MODEL = Path("models/twinflow-tiny")
GIB = 1 << 30
STATS_HEADER = {"x-twinflow-stats": "1"}
Messages = list[dict[str, str]]


class DemoFailed(Exception):
    """The message says what did not happen."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="start a small cluster, chat through it, show what moved, stop it",
        description="Starts a router, one prefill and one decode worker on this machine, holds a conversation through the "
        "openai client, prints a table of what each request found in the caches and moved, and stops everything.",
    )
    parser.add_argument("--model", default=str(MODEL), metavar="DIR_OR_HUB_ID", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=60, metavar="N", help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--ready-timeout", type=float, default=120.0, metavar="S", help="seconds (default: %(default)s)"
    )
    parser.add_argument("--logs", action="store_true", help="show what the processes log")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("openai") is None:
        fail("the demo talks through the official client: pip install 'twinflow[demo]'")
        return 2
    console = Console()
    settings = ClusterSettings(model=args.model, port=0)
    with tempfile.TemporaryDirectory(prefix="twinflow-demo-") as logs, stop_signals() as stop:
        made = plan(with_model_here(settings))
        sink = console.process_line if args.logs else None
        with Cluster(made, sink=sink, log_dir=Path(logs)) as cluster:
            console.line(console.paint(f"starting {', '.join(cluster.names)} with {args.model}", "1"))
            started = time.monotonic()
            try:
                cluster.start_all()
                if not cluster.wait_ready(args.ready_timeout, console.progress, stop.is_set):
                    return 130
                console.line(f"ready after {time.monotonic() - started:.1f} s on {made.base_url}/v1")
                rows = Conversation(made.base_url, settings.served_name, args.max_tokens, console).hold()
                cluster.check()
            except (ProcessDied, NotReady, DemoFailed) as e:
                report(e, cluster, console)
                return 1
            used = memory_bytes(p.pid for p in cluster.running)
            for line in ["", *table(rows), "", f"memory of the whole cluster: {used / GIB:.2f} GiB"]:
                console.line(line)
            killed = cluster.stop()
            if killed:
                fail(f"had to kill {', '.join(killed)}")
                return 1
            console.line(f"stopped; the demo took {time.monotonic() - started:.0f} s")
    return 0


class Conversation:
    """Sends the demo's requests one after another and prints each answer as it arrives."""

    def __init__(self, base_url: str, model: str, max_tokens: int, console: Console) -> None:
        import openai

        self._client: Any = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60.0)
        self._error: type[Exception] = openai.OpenAIError
        self._model = model
        self._max_tokens = max_tokens
        self._console = console

    def hold(self) -> list[Measured]:
        system = {"role": "system", "content": story.SYSTEM}
        chat: Messages = [system, {"role": "user", "content": story.FIRST}]
        first, answer = self._ask("1 long prompt", chat)
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": story.FOLLOW_UP}]
        second, _ = self._ask("2 second turn", chat)
        third, _ = self._ask("3 shares the prefix", [system, {"role": "user", "content": story.SIBLING}])
        fourth, _ = self._ask("4 shares it too", [system, {"role": "user", "content": story.SECOND_SIBLING}])
        return [first, second, third, fourth]

    def _ask(self, label: str, messages: Messages) -> tuple[Measured, str]:
        """One streamed answer. Raises DemoFailed when it ends in an error, empty, or without its statistics."""
        self._console.line("")
        question = messages[-1]["content"]
        shown = question if len(question) < 90 else f"{question[:40]} … {question[-45:]}"
        self._console.line(self._console.paint(f"[{label}] {' '.join(shown.split())}", "1"))
        sent = time.perf_counter()
        try:
            stream = self._client.chat.completions.create(
                model=self._model,
                messages=messages,
                stream=True,
                temperature=0,
                max_tokens=self._max_tokens,
                stream_options={"include_usage": True},
                extra_headers=STATS_HEADER,
            )
            arrivals, text, tokens, stats = self._read(stream, sent)
        except self._error as e:
            raise DemoFailed(f"request {label!r} failed: {e}") from e
        if not text:
            raise DemoFailed(f"request {label!r} was answered with no text")
        if not stats:
            raise DemoFailed(f"request {label!r} came without the statistics that it asked for")
        return Measured(label, arrivals, tokens, stats), text

    def _read(self, stream: Iterable[Any], sent: float) -> tuple[tuple[float, ...], str, int, dict[str, Any]]:
        arrivals: list[float] = []
        stats: dict[str, Any] = {}
        text, tokens = "", 0
        for chunk in stream:
            stats = (chunk.model_extra or {}).get("twinflow") or stats
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                arrivals.append(time.perf_counter() - sent)
                self._console.write(piece)
                text += piece
        return tuple(arrivals), text, tokens, stats


def report(error: Exception, cluster: Cluster, console: Console) -> None:
    """Says what went wrong, with the last lines of the processes that may know why."""
    tails: Sequence[tuple[str, tuple[str, ...]]]
    if isinstance(error, ProcessDied):
        tails = [(error.name, error.tail)]
    else:
        tails = [(p.name, p.tail[-8:]) for p in cluster.running]
    for name, tail in tails:
        for line in tail:
            console.process_line(name, line)
    fail(str(error))
