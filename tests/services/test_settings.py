"""Configuration of the workers: file, options, and what is wrong with them."""

from pathlib import Path

import pytest

from services.decode import config as decode
from services.prefill import config as prefill
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Role
from twinflow.engine.front import reachable
from twinflow.node.registry.factory import RegistryKind, RegistrySettings

TOML = """
model = "models/a"
worker_id = "d7"
role = "both"
router = ["r0:9", "r1:9"]
local_max_tokens = 12

[engine]
cache_bytes = "2GiB"
reserve_wait_s = 5

[session]
silence_s = 2.5
"""


def test_file_and_options(tmp_path: Path) -> None:
    path = tmp_path / "decode.toml"
    path.write_text(TOML)
    config = decode.load(["--config", str(path), "--local-max-tokens", "7", "--engine.dtype", "float32"])
    assert (config.engine.model, config.engine.worker_id, config.engine.role) == ("models/a", "d7", Role.BOTH)
    assert (config.router, config.local_max_tokens, config.model_name) == (("r0:9", "r1:9"), 7, "a")
    assert (config.engine.cache_bytes, config.engine.reserve_wait_s, config.engine.dtype) == (2 << 30, 5.0, "float32")
    assert (config.session.silence_s, config.session.heartbeat_s) == (2.5, 0.5)


def test_registry_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "prefill.toml"
    path.write_text('model = "m"\nregistry = "redis"\nredis_prefix = "blue"\nmetrics_port = -1\n')
    config = prefill.load(["--config", str(path), "--redis-ttl-s", "7"])
    assert config.registry == RegistrySettings(RegistryKind.REDIS, redis_prefix="blue", redis_ttl_s=7.0)
    assert config.metrics_port == -1
    assert decode.load(["--model", "m"]).registry == RegistrySettings()


def test_defaults() -> None:
    config = prefill.load(["--model", "org/name", "--router", "a:1, b:2"])
    assert config.engine.worker_id.startswith("prefill-")
    assert (config.engine.role, config.router, config.model_name) == (Role.PREFILL, ("a:1", "b:2"), "name")


WRONG = {
    "no-model": ([], "no model"),
    "role": (["--model", "m", "--role", "prefill"], "role 'prefill' is not one of decode, both"),
    "no-role": (["--model", "m", "--role", "chef"], "'chef' is not prefill|decode|both"),
    "number": (["--model", "m", "--engine.cache-bytes", "lots"], "--engine.cache-bytes: 'lots' is not INT"),
    "negative": (["--model", "m", "--local-max-tokens", "-1"], "local_max_tokens=-1"),
    "heartbeat": (["--model", "m", "--session.heartbeat-s", "9"], "session.heartbeat_s=9.0"),
    "registry": (["--model", "m", "--registry", "zookeeper"], "'zookeeper' is not direct|redis"),
    "prefix": (["--model", "m", "--redis-prefix", "a:b"], "redis_prefix='a:b'"),
    "file": (["--config", "/nowhere.toml"], "cannot read the configuration"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str) -> None:
    argv, message = WRONG[case]
    with pytest.raises(BadRequest) as caught:
        decode.load(argv)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 'x'", "unknown setting 'modle'"),
        ("[engin]\nthreads = 1", "unknown table [engin]"),
        ("[engine]\nthreads = 1.5", "threads: 1.5 is not INT"),
        ("[engine]\nrole = 'both'", "unknown setting 'role' in [engine]"),
        ("router = 5", "router: 5 is not A,B"),
        ("x", "cannot read the configuration"),
    ],
    ids=["setting", "table", "type", "hidden", "list", "syntax"],
)
def test_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(BadRequest) as caught:
        decode.load(["--config", str(path), "--model", "m"])
    assert message in caught.value.message


def test_reachable() -> None:
    assert reachable("10.0.0.1") == "10.0.0.1"
    assert reachable("0.0.0.0") not in ("0.0.0.0", "")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--engine.transport=rdma", "transport='rdma' is none of nixl, none"),
        ("--engine.verify=yes", "verify='yes' is none of none, checksum"),
        ("--engine.max-running=0", "max_running=0 must be at least 1"),
    ],
)
def test_engine_settings_that_cannot_work(option: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode.load(["--model", "m", option])
    assert message in caught.value.message
