"""`twinflow plan`: what a worker's memory will hold, before one is started. Needs a config, no weights and no GPU."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.lengths import quantile, read_trace
from services.cli.topology import size
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Role
from twinflow.engine.config import EngineConfig

if TYPE_CHECKING:
    from twinflow.engine.capacity import Lengths

SHARES = {"p50": 0.5, "p99": 0.99}
SAMPLE_TOKENS = (1, 1024, 4096, 16384, 65536)  # lengths to show when none were given


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="what fits on a device: KV tokens, state slots, requests at once",
        description="Prints what a worker's memory will hold: weights, workspace, attention blocks and state slots, what "
        "one request costs and how many run at once. Needs a model's config.json, no weights and no GPU.",
    )
    d = {f.name: f.default for f in dataclasses.fields(EngineConfig)}  # a worker's own
    parser.add_argument("model", metavar="MODEL", help="folder of a model, a config.json, or an id on the hub")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--device-bytes", type=size, metavar="SIZE", help="memory of the device, e.g. 24GiB")
    memory.add_argument("--cache-bytes", type=size, metavar="SIZE", help="memory of the cache alone, e.g. 512MiB")
    add = parser.add_argument
    add("--utilisation", type=float, default=d["utilisation"], metavar="SHARE",
        help="of the device; the rest is the driver's (default: %(default)s)")  # fmt: skip
    add("--role", choices=[r.value for r in Role], default=Role.BOTH.value, help="default: %(default)s")
    add("--max-running", type=int, default=d["max_running"], metavar="N",
        help="requests that run at once, one slot each (default: %(default)s)")  # fmt: skip
    add("--checkpoint-slots", type=int, default=d["checkpoint_slots"], metavar="N",
        help="slots beyond these that are kept for checkpoints (default: %(default)s)")  # fmt: skip
    add("--prompt-tokens", type=int, metavar="N", help="of a typical request")
    add("--output-tokens", type=int, default=0, metavar="N", help="of a typical request (default: %(default)s)")
    add("--trace", type=Path, metavar="FILE", help="lengths from a trace: Mooncake's JSON lines or Azure's CSV")
    add(
        "--dtype",
        default=d["dtype"],
        help="of weights and KV: auto, float32, bfloat16 or float16 (default: %(default)s)",
    )
    add("--state-dtype", default=d["state_dtype"], help="of temporal states (default: %(default)s)")
    add("--block-tokens", type=int, default=d["block_tokens"], metavar="N", help="default: %(default)s")
    add("--step-tokens", type=int, default=d["step_tokens"], metavar="N",
        help="token budget of one step (default: %(default)s)")  # fmt: skip
    add("--tensors", action="store_true", help="also list the weights by name and shape")
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Imports what needs torch."""
    from services.cli import plan_table
    from twinflow.engine.capacity import Ask, plan_capacity
    from twinflow.engine.sizing import shape_of

    role = Role(args.role)
    lengths = lengths_from(args)
    shape = shape_of(args.model, dtype=args.dtype, block_tokens=args.block_tokens, state_dtype=args.state_dtype)
    ask = Ask(
        role=role,
        max_running=args.max_running,
        device_bytes=args.device_bytes,
        utilisation=args.utilisation,
        cache_bytes=args.cache_bytes,
        checkpoint_slots=args.checkpoint_slots,
        step_tokens=args.step_tokens,
    )
    capacity = plan_capacity(shape, ask)
    costs = {name: capacity.request(max(1, each.held_tokens(role))) for name, each in lengths.items()}
    if not lengths:
        tokens = [n for n in SAMPLE_TOKENS if n < capacity.max_request_tokens] + [capacity.max_request_tokens]
        costs = {str(n): capacity.request(n) for n in tokens}
    if args.json:
        print(json.dumps(plan_table.as_json(shape, ask, capacity, costs, lengths, tensors=args.tensors), indent=2))
        return 0
    for line in plan_table.lines(args.model, shape, ask, capacity, costs, lengths, tensors=args.tensors):
        print(line)
    return 0


def lengths_from(args: argparse.Namespace) -> "dict[str, Lengths]":
    """By name: one "typical" length as given, p50 and p99 of a trace, or nothing. Raises BadRequest."""
    from twinflow.engine.capacity import Lengths

    if args.trace is not None:
        if args.prompt_tokens is not None:
            raise BadRequest("give either --trace or --prompt-tokens, not both", param="trace")
        rows = read_trace(args.trace)
        columns: list[Any] = [[row[i] for row in rows] for i in (0, 1)]
        return {name: Lengths(*(quantile(c, share) for c in columns)) for name, share in SHARES.items()}
    if args.prompt_tokens is None:
        if args.output_tokens:
            raise BadRequest("--output-tokens needs --prompt-tokens", param="output_tokens")
        return {}
    if args.prompt_tokens < 1 or args.output_tokens < 0:
        raise BadRequest(f"{args.prompt_tokens} prompt and {args.output_tokens} output tokens are no request")
    return {"typical": Lengths(args.prompt_tokens, args.output_tokens)}
