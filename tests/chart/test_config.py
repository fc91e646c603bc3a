"""The TOML that reaches a service is one that its own parser takes, with the values that were meant."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.decode.config import DecodeConfig
from services.decode.config import load as load_decode
from services.prefill.config import PrefillConfig
from services.prefill.config import load as load_prefill
from services.router.config import RouterConfig, read_config
from tests.chart.parts import Manifest, of_kind, pods
from tools.chart.check import SCHEMA
from tools.chart.schema import OWN_OF_ROUTER, OWN_OF_WORKERS
from twinflow.contracts.workers import Role

Load = Callable[..., list[Manifest]]
LOADERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "router": read_config,
    "prefill": load_prefill,
    "decode": load_decode,
}
POD = {"POD_IP": "10.1.2.3", "POD_NAME": "twinflow-0"}


def config(manifests: Sequence[Manifest], role: str, folder: Path) -> Any:
    """What the service in that container would run with: its file, and its arguments as Kubernetes expands them."""
    container = pods(manifests)[role]["containers"][0]
    service, *args = container["args"]
    assert service == role
    maps = of_kind(manifests, "ConfigMap")
    file = folder / f"{role}.toml"
    file.write_text(maps[f"twinflow-{role}"]["data"][file.name])
    for name, value in POD.items():
        args = [a.replace(f"$({name})", value) for a in args]
    return LOADERS[role]([a.replace("/etc/twinflow/", f"{folder}/") for a in args])


def test_the_services_take_their_files(manifests: Load, value_set: str, tmp_path: Path) -> None:
    made = manifests(value_set)
    router: RouterConfig = config(made, "router", tmp_path)
    prefill: PrefillConfig = config(made, "prefill", tmp_path)
    decode: DecodeConfig = config(made, "decode", tmp_path)
    assert router.model_name == prefill.model_name == decode.model_name
    assert router.local_max_tokens == decode.local_max_tokens
    assert (prefill.engine.role, decode.engine.role) == (Role.PREFILL, Role.DECODE)
    assert router.http_host == router.grpc_host == prefill.host == decode.host == "0.0.0.0"
    services = of_kind(made, "Service")
    for worker in (prefill, decode):
        assert worker.advertise == "10.1.2.3:7100" and worker.port == 7100
        host, _, port = worker.router[0].rpartition(":")
        assert host in services and int(port) == services[host]["spec"]["ports"][0]["port"] == router.grpc_port
        assert worker.engine.worker_id == "twinflow-0"
        assert worker.engine.device == ("cuda" if value_set == "gpu" else "cpu")
    assert prefill.engine.block_tokens == decode.engine.block_tokens


def test_sizes_and_large_numbers_arrive_whole(manifests: Load, tmp_path: Path) -> None:
    options = "decode.config.engine.step_tokens=12345678,decode.config.engine.cache_bytes=34359738368"
    seconds = "decode.config.session.silence_s=2.5,decode.config.session.idle_s=100,decode.config.local_max_tokens=77"
    made = manifests("gpu", "--set-json", f"{options},{seconds}")
    decode: DecodeConfig = config(made, "decode", tmp_path)
    assert (decode.engine.step_tokens, decode.engine.cache_bytes) == (12345678, 32 << 30)
    assert (decode.session.silence_s, decode.session.idle_s) == (2.5, 100.0)
    assert decode.local_max_tokens == 77
    router: RouterConfig = config(made, "router", tmp_path)
    assert router.local_max_tokens == 77, "the router predicts by the decode workers' number"


def test_without_prefill_workers_decode_workers_do_both(manifests: Load, tmp_path: Path) -> None:
    made = manifests("cpu", "--set=prefill.replicas=0")
    decode: DecodeConfig = config(made, "decode", tmp_path)
    assert decode.engine.role is Role.BOTH and decode.engine.transport == "none"
    assert not any("prefill" in m["metadata"]["name"] for m in made)


def test_ipv6(manifests: Load, tmp_path: Path) -> None:
    made = manifests("cpu", "--set=ipFamily=IPv6")
    assert config(made, "router", tmp_path).http_host == "::"
    assert config(made, "decode", tmp_path).host == "::"


def test_a_registry_in_redis(manifests: Load, tmp_path: Path) -> None:
    own = manifests("cpu", "--set=registry.kind=redis,redis.enabled=true,redis.passwordSecret.name=redis-auth")
    theirs = manifests("cpu", "--set=registry.kind=redis,registry.urlSecret.name=our-redis")
    for role in LOADERS:
        settings = config(own, role, tmp_path).registry
        assert (settings.registry.value, settings.redis_prefix, settings.redis_ttl_s) == (
            "redis",
            "twinflow.twinflow",
            5.0,
        )
        env = {e["name"]: e for e in pods(own)[role]["containers"][0]["env"]}
        assert env[settings.redis_url_env]["value"] == "redis://:$(REDIS_AUTH)@twinflow-redis:6379/0"
        assert list(env).index("REDIS_AUTH") < list(env).index(settings.redis_url_env), (
            "expanded from what stands before"
        )
        env = {e["name"]: e for e in pods(theirs)[role]["containers"][0]["env"]}
        assert env[settings.redis_url_env]["valueFrom"]["secretKeyRef"] == {"name": "our-redis", "key": "url"}


@pytest.mark.parametrize("role", LOADERS)
def test_every_setting_of_a_service_is_a_value_or_the_charts_own(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        LOADERS[role](["--help"])
    options = set(re.findall(r"^  --([a-z][a-z0-9.-]*)", capsys.readouterr().out, re.MULTILINE)) - {"config"}
    known = json.loads(SCHEMA.read_text())["properties"][role]["properties"]["config"]["properties"]
    given = set()
    for name, node in known.items():
        given |= {f"{name}.{inner}" for inner in node["properties"]} if node["type"] == "object" else {name}
    own = set(OWN_OF_ROUTER if role == "router" else OWN_OF_WORKERS) - {"incarnation"}
    assert {o.replace("-", "_") for o in options} == given | own


def test_the_router_reads_the_shipped_model(manifests: Load, tmp_path: Path) -> None:
    router: RouterConfig = config(manifests("cpu"), "router", tmp_path)
    folder = Path("models") / Path(router.model).name
    assert router.model == f"/opt/twinflow/{folder}"
    assert (folder / "tokenizer.json").is_file()
    for dockerfile in Path("deploy/docker").glob("Dockerfile.*"):
        assert f" {folder} {router.model}\n" in dockerfile.read_text()
