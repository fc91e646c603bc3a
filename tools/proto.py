"""Generates the gRPC stubs next to their package: proto/twinflow/rpc/v1/*.proto → twinflow/rpc/v1/*_pb2{,_grpc}.py{,i}.

`--check` generates into a temporary folder instead and fails when what is committed differs (part of `make lint`). Stubs
depend on the grpcio-tools version, which is therefore exact in pyproject.toml.
"""

import argparse
import difflib
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def sources() -> list[str]:
    return sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))


def generate(out: Path) -> None:
    """Writes the stubs of all sources under `out`. Raises SystemExit when protoc refuses."""
    import grpc_tools

    include = Path(grpc_tools.__file__).parent / "_proto"
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", f"-I{PROTO}", f"-I{include}", *flags, *sources()])
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")


def stubs(root: Path) -> dict[str, str]:
    folders = {(root / s).parent for s in sources()}
    return {
        str(p.relative_to(root)): p.read_text()
        for f in folders
        for pattern in PATTERNS
        for p in sorted(f.glob(pattern))
    }


def check() -> int:
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh, committed = stubs(Path(tmp)), stubs(ROOT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    for name in stale:
        old, new = (stub.get(name, "").splitlines(keepends=True) for stub in (committed, fresh))
        sys.stdout.writelines(list(difflib.unified_diff(old, new, f"{name} (committed)", f"{name} (generated)"))[:20])
    if stale:
        print(f"{len(stale)} stub(s) do not match proto/: run `make proto` and commit the result")
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Generates the gRPC stubs, or checks that they are current.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when stubs are stale")
    if parser.parse_args().check:
        return check()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
