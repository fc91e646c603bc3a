"""`twinflow bench handoff`: starts a prefill and a decode worker on this machine and times hand-offs between them."""

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from services.cli.bench_pair import room, workers
from services.cli.topology import size
from twinflow.contracts.errors import BadRequest, Internal

if TYPE_CHECKING:
    from twinflow.bench.handoff import PlainCopy, Shooter, Shot

STREAMED = "streamed"
Say = Callable[[str], None]


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    handoff = kinds.add_parser(
        "handoff",
        allow_abbrev=False,
        help="hand-offs between a prefill and a decode worker: rate, what is left after the prompt, the second token",
        description="Starts a prefill and a decode worker (whole processes, real transport) and times hand-offs one at a time. "
        "Unstreamed: the prompt is computed in one chunk, so all of it is read at once; beside it a plain copy of the same bytes "
        "between the same devices. One slot: a prompt whose attention blocks the decode worker has. Streamed: by chunks.",
    )
    add = handoff.add_argument
    add("--model", required=True, metavar="MODEL", help="folder or hub id; with --load-format dummy also a config.json")
    add("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights, a config is enough")
    add("--dtype", default="auto", help="of weights and KV: auto, float32, bfloat16 or float16 (default: %(default)s)")
    add("--state-dtype", default="float32", help="of temporal states (default: %(default)s)")
    add("--prefill-device", default="cuda:0", metavar="DEVICE", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--decode-device", default="cuda:1", metavar="DEVICE",
        help="the same; one card for both is a case of its own (default: %(default)s)")  # fmt: skip
    add("--tokens", type=int, default=16384, metavar="N", help="of a prompt (default: %(default)s)")
    add(
        "--chunk-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="of a streamed prompt's parts (default: %(default)s)",
    )
    add("--rounds", type=int, default=5, metavar="N", help="of each kind; the median counts (default: %(default)s)")
    add("--block-tokens", type=int, default=64, metavar="N", help="of an attention block (default: %(default)s)")
    add("--cache-bytes", type=size, metavar="SIZE", help="of each arena (default: what the prompts need)")
    add("--verify", default="none", choices=("none", "checksum"), help="compare what was read (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    handoff.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Kind:
    """One table: hand-offs of a kind, and plain copies of as many bytes after them."""

    name: str
    shots: "list[Shot]"
    copy: "PlainCopy"

    def median(self, what: Callable[["Shot"], float]) -> float:
        return median(what(s) for s in self.shots)

    @property
    def of_plain_copy(self) -> float:
        """A read's rate as a share of a copy's that is told and waited for alone as well."""
        return self.copy.alone_s / self.median(lambda s: s.read_s)

    @property
    def of_link(self) -> float:
        return self.copy.in_row_s / self.median(lambda s: s.read_s)


@dataclass(slots=True)
class Bench:
    args: argparse.Namespace
    say: Say
    kinds: list[Kind] = field(default_factory=list)

    async def run(self) -> None:
        whole, chunk = self.args.tokens, self.args.chunk_tokens
        async with workers(self.args, chunk_tokens=whole) as shooter:
            await self._unstreamed(shooter)
        async with workers(self.args, chunk_tokens=chunk) as shooter:
            self._add(STREAMED, [await shooter.shoot(shooter.fresh(whole)) for _ in self._rounds()])

    async def _unstreamed(self, shooter: "Shooter") -> None:
        """Behind every whole prompt one that begins it and ends at a block: its attention is there, its state is not."""
        block = self.args.block_tokens
        whole, slots = [], []
        for _ in self._rounds():
            prompt = shooter.fresh(self.args.tokens)
            whole.append(await shooter.shoot(prompt))
            slots.append(await shooter.shoot(prompt[: self.args.tokens // 2 // block * block]))
        moved = {(s.blocks, s.slots) for s in slots}
        if moved != {(0, 1)}:
            raise Internal(f"a prompt whose blocks are there moved (blocks, slots) {sorted(moved)}, not one slot")
        self._add("unstreamed", whole)
        self._add("one slot", slots)

    def _rounds(self) -> range:
        return range(self.args.rounds + 1)

    def _add(self, name: str, shots: "list[Shot]") -> None:
        """The first one connects and compiles, and does not count."""
        from twinflow.bench.handoff import plain_copy

        shots = shots[1:]
        copy = plain_copy(shots[0].bytes, self.args.prefill_device, self.args.decode_device)
        self.kinds.append(Kind(name, shots, copy))
        for line in lines(self.kinds[-1]):
            self.say(line)

    def as_json(self) -> dict[str, Any]:
        options = {k: v if isinstance(v, int | None) else str(v) for k, v in vars(self.args).items() if k != "run"}
        rows = [
            {
                "kind": k.name,
                "plain_copy": asdict(k.copy),
                "of_plain_copy": k.of_plain_copy,
                "of_link": k.of_link,
                "shots": [asdict(s) for s in k.shots],
            }
            for k in self.kinds
        ]
        return {"options": options, "kinds": rows}


def lines(kind: Kind) -> Sequence[str]:
    """What is printed of a kind: medians, and the goals that hold between two cards."""
    one = kind.shots[0]
    head = (
        f"{kind.name}: {one.bytes / 1e6:,.1f} MB ({one.blocks} blocks, {one.slots} slots) in {one.descriptors} ranges "
        f"over {one.transport}"
    )
    parts = ", ".join(f"{name} {1e3 * median(s.parts[name] for s in kind.shots):.2f}" for name in one.parts)
    told = f"  token 2 after the prompt: {parts} ms"
    if kind.name != STREAMED:
        read_s, rate = kind.median(lambda s: s.read_s), kind.median(lambda s: s.bytes_per_s)
        rates = (
            f"  post to DONE {1e3 * read_s:.3f} ms = {rate / 1e9:.2f} GB/s; a plain copy told and seen to end "
            f"{1e3 * kind.copy.alone_s:.3f} ms: {kind.of_plain_copy:.2f} of its rate (goal: 0.90); many in a row "
            f"{1e3 * kind.copy.in_row_s:.3f} ms each: {kind.of_link:.2f}"
        )
        most = max(s.pulls for s in kind.shots)
        split = (f"  NOT one read: it was read in up to {most} parts, one after the other",) if most > 1 else ()
        return head, rates, *split, told
    early, tail_s = kind.median(lambda s: s.early_bytes / s.bytes), kind.median(lambda s: s.tail_s)
    gap_s, step_s = kind.median(lambda s: s.gap_s), kind.median(lambda s: s.step_s)
    first_s = kind.median(lambda s: s.first_s)
    waits = f"  first token after {1e3 * first_s:.1f} ms, second {1e3 * gap_s:.2f} ms later; one decode step "
    return (
        head,
        f"  read before the prompt was computed {early:.1%}, left after it {1e3 * tail_s:.2f} ms (goal on NVLink: 3)",
        waits + f"{1e3 * step_s:.2f} ms, so {1e3 * (gap_s - step_s):.2f} ms more (goal: 5)",
        told,
    )


def run(args: argparse.Namespace) -> int:
    """Imports what needs torch."""
    least = {"rounds": 1, "block_tokens": 1, "chunk_tokens": 1, "tokens": 2 * args.block_tokens}
    for name, value in least.items():
        if getattr(args, name) < value:
            raise BadRequest(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {value}", param=name)
    args.cache_bytes = args.cache_bytes or room(args)
    bench = Bench(args, lambda text: print(text, flush=True))
    bench.say(
        f"{args.tokens:,} tokens from {args.prefill_device} to {args.decode_device}, {args.rounds} of each kind, medians; "
        f"UCX_TLS={os.environ.get('UCX_TLS', 'default')}"
    )
    try:
        asyncio.run(bench.run())
    finally:
        if args.json is not None:
            args.json.write_text(json.dumps(bench.as_json(), indent=2) + "\n")
    return 0
