"""What an operator may write: unknown keys and wrong types are refused by name, everything is described."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.chart.parts import Manifest, pods
from tools.chart.check import CHART, SCHEMA, render
from tools.chart.fetch import Tools
from twinflow import __version__


@pytest.mark.parametrize(
    "setting",
    [
        "replicas=2",
        "router.replicas=2",
        "prefill.replica=2",
        "prefill.config.engine.cash_bytes=1GiB",
        "prefill.config.max_opn=3",
        "decode.config.max_open=3",
        "decode.config.session.silence=3",
        "decode.config.model=other",
        "router.config.http_port=81",
        "decode.probes.liveness.path=/live",
        "image.router.name=x",
        "ports.grpc=1",
        "redis.password=hunter2",
        "model.token=hf_x",
        "decode.resources.limit.cpu=1",
    ],
)
def test_an_unknown_key_is_refused(tools: Tools, setting: str) -> None:
    done = render(tools, f"--set={setting}")
    assert done.returncode != 0
    assert "additional propert" in done.stderr.lower(), done.stderr
    assert setting.partition("=")[0].rpartition(".")[2] in done.stderr or "limit" in done.stderr


@pytest.mark.parametrize(
    "setting",
    [
        'decode.replicas="two"',
        "decode.replicas=0",
        "decode.config.engine.max_running=1.5",
        'decode.config.engine.cache_bytes="many"',
        'decode.config.session.silence_s="3"',
        "podSecurity.runAsUser=0",
        "ports.http=70000",
        'ipFamily="IPv5"',
        'model.source="s3"',
        'model.hubId=""',
        'model={"name":"m","source":"pvc","claim":""}',
        'model={"name":"m","source":"hostPath","path":"relative"}',
        'image.router.digest="sha256:12"',
        'decode.extraEnv=[{"name":"HF_TOKEN","value":"hf_x"}]',
        'redis.passwordSecret.key="a b"',
    ],
)
def test_a_wrong_value_is_refused(tools: Tools, setting: str) -> None:
    done = render(tools, "--set-json", setting)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr, done.stderr


def nodes(schema: Manifest, path: str = "") -> Iterator[tuple[str, Manifest]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}[]")


# Objects of the Kubernetes API, which the API checks; Helm's own.
FREE = ("as in the Kubernetes API: ", "a key of", "a field of", "a resource of", "Helm's own")


def test_every_value_is_typed_described_and_closed() -> None:
    for path, node in nodes(json.loads(SCHEMA.read_text())):
        assert "type" in node, path
        if not path.endswith("[]"):
            assert node.get("description"), path
        free = node.get("description", "").startswith(FREE) or path == ".extraObjects[]"
        if node["type"] == "object" and not free:
            assert "additionalProperties" in node, path


def test_every_default_is_in_the_schema() -> None:
    schema = json.loads(SCHEMA.read_text())

    def walk(values: Any, node: Manifest, path: str) -> None:
        for key, value in values.items():
            if "properties" in node:
                assert key in node["properties"], f"{path}.{key}"
                if isinstance(value, dict):
                    walk(value, node["properties"][key], f"{path}.{key}")

    walk(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_every_value_outside_config_has_a_default() -> None:
    """So that values.yaml shows whatever can be set; `config` has the services' own defaults."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def walk(node: Manifest, given: Any, path: str) -> None:
        for key, inner in node.get("properties", {}).items():
            if path.endswith((".config", ".affinity")) or key == "global":
                continue
            assert key in given, f"{path}.{key}"
            if inner["type"] == "object":
                walk(inner, given[key], f"{path}.{key}")

    walk(json.loads(SCHEMA.read_text()), values, "")


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_a_digest_wins_over_a_tag(manifests: Callable[..., list[Manifest]]) -> None:
    digest = "sha256:" + "0" * 64
    spec = pods(manifests("cpu", f"--set=image.engine.digest={digest},image.router.tag=1.2"))
    assert spec["decode"]["containers"][0]["image"] == f"twinflow/engine@{digest}"
    assert spec["router"]["containers"][0]["image"] == "twinflow/router:1.2"


def test_a_registry_in_redis_needs_one(tools: Tools) -> None:
    done = render(tools, "--set=registry.kind=redis")
    assert done.returncode != 0
    assert "registry.kind=redis needs registry.urlSecret.name, or redis.enabled=true" in done.stderr
