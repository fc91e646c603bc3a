"""Checks chart and Dockerfiles: schema and rendered manifests are current, `helm lint`, the Kubernetes schema, hadolint.

    python -m tools.chart.check            fails when something is wrong or what is committed is stale
    python -m tools.chart.check --write    writes values.schema.json and deploy/helm/rendered first

The tests of what is rendered are in tests/chart; `make chart` runs both.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.chart.fetch import ROOT, Tools, fetch
from tools.chart.schema import values_schema

CHART = ROOT / "deploy/helm/twinflow"
RENDERED = ROOT / "deploy/helm/rendered"
SCHEMA = CHART / "values.schema.json"
VALUE_SETS: dict[str, tuple[str, ...]] = {"gpu": (), "cpu": ("values-cpu.yaml",)}  # name → files on top of values.yaml
KUBERNETES = "1.35.0"
DOCKERFILES = tuple(sorted((ROOT / "deploy/docker").glob("Dockerfile.*")))


def render(tools: Tools, *options: str, value_set: str = "gpu") -> subprocess.CompletedProcess[str]:
    """`helm template` of release `twinflow`; the caller looks at the exit code."""
    files = [f"--values={CHART / f}" for f in VALUE_SETS[value_set]]
    command = [str(tools.helm), "template", "twinflow", str(CHART), "--namespace=twinflow", *files, *options]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(tools: Tools, value_set: str) -> str:
    """The manifests as they are committed. Raises SystemExit with helm's words."""
    done = render(tools, f"--kube-version={KUBERNETES}", value_set=value_set)
    if done.returncode:
        raise SystemExit(f"helm template ({value_set}):\n{done.stderr}")
    return done.stdout


def schema_text() -> str:
    return json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n"


def current(path: Path, text: str, write: bool) -> bool:
    """Whether the file has this text; with `write` it has afterwards."""
    if path.is_file() and path.read_text() == text:
        return True
    shown = path.relative_to(ROOT)
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {shown}")
        return True
    print(f"{shown} is stale: python -m tools.chart.check --write", file=sys.stderr)
    return False


def passes(what: str, command: Sequence[object]) -> bool:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    print(f"{'ok' if done.returncode == 0 else 'FAILED'}: {what}")
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the Helm chart and the Dockerfiles.")
    parser.add_argument("--write", action="store_true", help="write the schema and the rendered manifests")
    write = parser.parse_args().write
    tools = fetch()
    results = [current(SCHEMA, schema_text(), write)]
    for name, files in VALUE_SETS.items():
        values = [f"--values={CHART / f}" for f in files]
        results.append(passes(f"helm lint ({name})", [tools.helm, "lint", "--strict", CHART, *values]))
        path = RENDERED / f"{name}.yaml"
        results.append(current(path, rendered(tools, name), write))
        validate = [tools.kubernetes_validate, "-k", KUBERNETES, "--strict", path]
        results.append(passes(f"Kubernetes {KUBERNETES} schema ({name})", validate))
    results.append(passes("hadolint", [tools.hadolint, *DOCKERFILES]))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
