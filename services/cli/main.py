"""`twinflow`: parses the command line and calls the command. Commands are modules with `add_parser` and `run(args) -> int`.

Services are imported only when one is started, so that a router host needs no torch and `--help` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence

from services.cli import admin, bench, demo, plan, serve, up
from services.cli.console import fail
from twinflow import __version__
from twinflow.contracts.errors import TwinflowError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinflow",
        allow_abbrev=False,
        description="Serves hybrid language models with prefill and decode in separate workers behind one OpenAI-compatible "
        "router.",
    )
    parser.add_argument("--version", action="version", version=f"twinflow {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    up.add_parser(commands)
    demo.add_parser(commands)
    admin.add_parser(commands)
    plan.add_parser(commands)
    bench.add_parser(commands)
    serve.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in serve.SERVICES:  # the service parses its own settings, --help included
            return serve.run(arguments[0], arguments[1:])
        args = build_parser().parse_args(arguments)
        code: int = args.run(args)
        return code
    except TwinflowError as e:
        fail(e.message)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
