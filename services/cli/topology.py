"""Settings of a cluster on this machine → the processes to start. Pure but for asking the system for free ports."""

import argparse
import dataclasses
import math
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.cluster import ClusterPlan, free_ports
from services.cli.process import ProcessSpec
from services.cli.serve import PARENT_ENV
from twinflow.contracts.errors import BadRequest, ModelError
from twinflow.engine.config import UTILISATION
from twinflow.models.hub import resolve_folder
from twinflow.node.settings import parse_int

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """`None` leaves a setting to the workers' own default."""

    model: str  # folder or hub id
    served_model: str | None = None  # as clients name it; default: last part of `model`
    prefill: int = 1  # prefill workers; 0 = decode workers also prefill (aggregated)
    decode: int = 1
    host: str = LOOPBACK  # where the router listens for HTTP; workers stay on loopback
    port: int = 8000  # of the router's HTTP; 0 = a free one
    device: str | None = None  # of all workers: cpu, or cuda
    dtype: str | None = None
    cache_bytes: int | None = None  # arena of each worker
    transport: str | None = None  # nixl, or none
    verify: str | None = None  # checksum = compare what was moved before using it
    decode_prefix_cache: bool = (
        True  # False = decode workers find nothing of what they have computed or received before
    )
    extra: tuple[tuple[str, str], ...] = ()  # (process name prefix, "option=value") for what has no flag here

    @property
    def served_name(self) -> str:
        return self.served_model or Path(self.model).name


def add_options(parser: argparse.ArgumentParser) -> None:
    d = {f.name: f.default for f in dataclasses.fields(ClusterSettings)}
    parser.add_argument(
        "--model", required=True, metavar="DIR_OR_HUB_ID", help="folder with a model, or its id on the hub"
    )
    parser.add_argument("--served-model", metavar="NAME", help="as clients name it (default: last part of --model)")
    parser.add_argument(
        "--prefill", type=int, default=d["prefill"], metavar="N",
        help="prefill workers; 0 = decode workers prefill too (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--decode", type=int, default=d["decode"], metavar="N", help="decode workers (default: %(default)s)"
    )
    parser.add_argument("--host", default=d["host"], help="where the router listens for HTTP (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=d["port"], help="of the router's HTTP; 0 = a free one (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N, of every worker (default: the workers' own)")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16, of weights and KV (default: auto)")
    parser.add_argument(
        "--cache-bytes",
        type=size,
        metavar="SIZE",
        help="cache of each worker, e.g. 512MiB or 8GiB (default: the workers' own)",
    )
    parser.add_argument("--transport", help="nixl, or none where nothing is moved (default: nixl)")
    parser.add_argument("--verify", help="checksum = compare what was moved before using it (default: none)")
    parser.add_argument(
        "--no-decode-prefix-cache", action="store_false", dest="decode_prefix_cache",
        help="decode workers keep nothing for later prompts: what their hits give, measured by the same load without them",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], dest="extra", metavar="PROCESS:OPTION=VALUE", type=extra,
        help="a setting of one process or kind that has no option here, e.g. decode:engine.step-tokens=4096, "
        "prefill-1:engine.device=cuda:1 or router:log-level=debug; see twinflow PROCESS --help; may be repeated",
    )  # fmt: skip


def size(text: str) -> int:
    try:
        value = parse_int(text)
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, 512MiB or 8GiB") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive")
    return value


def extra(text: str) -> tuple[str, str]:
    process, colon, setting = text.partition(":")
    if not colon or "=" not in setting or process.split("-")[0] not in ("router", "prefill", "decode"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PROCESS:OPTION=VALUE with a process router, prefill[-N] or decode[-N]"
        )
    return process, setting


def settings_from(args: argparse.Namespace) -> ClusterSettings:
    """What `add_options` parsed."""
    names = {f.name for f in dataclasses.fields(ClusterSettings)}
    given: dict[str, Any] = {k: v for k, v in vars(args).items() if k in names}
    return ClusterSettings(**given | {"extra": tuple(args.extra)})


def with_model_here(settings: ClusterSettings) -> ClusterSettings:
    """The same with `model` as a folder: a hub id is downloaded once, before any process needs it. Raises ModelError,
    and BadRequest as `check` does, before anything is downloaded."""
    check(settings)
    folder = resolve_folder(settings.model)
    if not (folder / "config.json").is_file():
        raise ModelError(f"--model {settings.model}: {folder} has no config.json, so it holds no model")
    return dataclasses.replace(settings, model=str(folder), served_model=settings.served_name)


def check(settings: ClusterSettings) -> None:
    """Raises BadRequest, naming the option, on a cluster that cannot be."""
    if settings.prefill < 0:
        raise BadRequest(f"--prefill must be 0 or more, got {settings.prefill}")
    if settings.decode < 1:
        raise BadRequest(
            f"--decode must be 1 or more, got {settings.decode}: every request is answered by a decode worker"
        )
    if not 0 <= settings.port < 1 << 16:
        raise BadRequest(f"--port must be 0 to 65535, got {settings.port}")
    if settings.port and taken(settings.host, settings.port):
        raise BadRequest(f"--port {settings.port} is in use on {settings.host}; choose another, or 0 for a free one")


def taken(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return True
    return False


def plan(settings: ClusterSettings) -> ClusterPlan:
    """Names: router, prefill-0 …, decode-0 …. Raises BadRequest as `check` does."""
    check(settings)
    http_port, registry_port, *worker_ports = free_ports(2 + settings.prefill + settings.decode)
    http_port = settings.port or http_port
    registry = f"{LOOPBACK}:{registry_port}"
    specs = [spec(settings, "router", "router", router_options(settings, http_port, registry_port))]
    names = [*worker_names("prefill", settings.prefill), *worker_names("decode", settings.decode)]
    for (service, name), port in zip(names, worker_ports, strict=True):
        specs.append(spec(settings, service, name, worker_options(settings, service, name, port, registry)))
    shown = LOOPBACK if settings.host in ("0.0.0.0", "::") else settings.host
    return ClusterPlan(tuple(specs), f"http://{shown}:{http_port}", tuple(name for _, name in names), registry)


def worker_names(service: str, count: int) -> Iterator[tuple[str, str]]:
    return ((service, f"{service}-{i}") for i in range(count))


def spec(settings: ClusterSettings, service: str, name: str, options: dict[str, object]) -> ProcessSpec:
    """`options` without those that are None, then the `extra` ones of this process, which win."""
    given = [f"--{key}={value}" for key, value in options.items() if value is not None]
    given += [f"--{setting}" for process, setting in settings.extra if process in (service, name)]
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", PARENT_ENV: str(os.getpid())}
    return ProcessSpec(name, (sys.executable, "-m", "services.cli", service, *given), env)


def worker_options(settings: ClusterSettings, service: str, name: str, port: int, registry: str) -> dict[str, object]:
    aggregated = settings.prefill == 0
    return {
        "model": settings.model,
        "served-model": settings.served_name,
        "worker-id": name,
        "role": "both" if aggregated else service,
        "host": LOOPBACK,
        "port": port,
        "router": registry,
        "engine.device": settings.device,
        "engine.dtype": settings.dtype,
        "engine.cache-bytes": settings.cache_bytes,
        "engine.utilisation": share_of_device(settings),
        "engine.transport": settings.transport or ("none" if aggregated else None),
        "engine.verify": settings.verify,
        "engine.prefix-cache": None if service == "prefill" or settings.decode_prefix_cache else "false",
    }


def share_of_device(settings: ClusterSettings) -> float | None:
    """Of the one GPU that all workers are on, for each; None where each has the default."""
    workers = settings.prefill + settings.decode
    if not (settings.device or "").startswith("cuda") or workers == 1:
        return None
    return math.floor(100 * UTILISATION / workers) / 100


def router_options(settings: ClusterSettings, http_port: int, registry_port: int) -> dict[str, object]:
    return {
        "model": settings.model,
        "served-model": settings.served_name,
        "http-host": settings.host,
        "http-port": http_port,
        "grpc-host": LOOPBACK,
        "grpc-port": registry_port,
    }
