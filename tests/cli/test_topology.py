"""From settings to processes: names, options that reach each process, and what the workers make of them."""

import pytest

from services.cli.cluster import ClusterPlan
from services.cli.main import build_parser
from services.cli.topology import ClusterSettings, plan, settings_from
from services.decode.config import load as load_decode
from services.prefill.config import load as load_prefill
from services.router.config import read_config as load_router
from twinflow.contracts.workers import Role


def options(made: ClusterPlan, name: str) -> list[str]:
    """The argument list that the service itself parses."""
    argv = next(s.argv for s in made.specs if s.name == name)
    return list(argv[4:])


def test_names_and_order() -> None:
    made = plan(ClusterSettings("org/model", prefill=2, decode=1, port=0))
    assert [s.name for s in made.specs] == ["router", "prefill-0", "prefill-1", "decode-0"]
    assert made.workers == ("prefill-0", "prefill-1", "decode-0")
    assert made.base_url.startswith("http://127.0.0.1:")


def test_services_accept_what_they_are_given() -> None:
    settings = ClusterSettings("org/model", port=0, cache_bytes=1 << 26, dtype="float32", verify="checksum")
    made = plan(settings)
    router = load_router(options(made, "router"))
    prefill = load_prefill(options(made, "prefill-0"))
    decode = load_decode(options(made, "decode-0"))
    assert (prefill.engine.role, decode.engine.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.port != decode.port
    assert prefill.router == decode.router
    for worker in (prefill, decode):
        assert worker.engine.cache_bytes == 1 << 26
        assert worker.engine.dtype == "float32"
        assert worker.engine.verify == "checksum"
        assert worker.engine.transport == "nixl"
        assert worker.model_name == "model"
    assert router.model == "org/model"


def test_without_prefill_workers_decode_workers_are_aggregated() -> None:
    made = plan(ClusterSettings("org/model", prefill=0, decode=2, port=0))
    for name in ("decode-0", "decode-1"):
        engine = load_decode(options(made, name)).engine
        assert (engine.role, engine.transport, engine.worker_id) == (Role.BOTH, "none", name)


def test_workers_on_one_gpu_share_it() -> None:
    """Unless they are set otherwise."""
    on_one = plan(ClusterSettings("org/model", prefill=1, decode=2, device="cuda", port=0))
    shares = [load_prefill(options(on_one, "prefill-0")).engine.utilisation]
    shares += [load_decode(options(on_one, f"decode-{i}")).engine.utilisation for i in range(2)]
    assert shares == [0.3, 0.3, 0.3]
    alone = plan(ClusterSettings("org/model", prefill=0, decode=1, device="cuda", port=0))
    assert load_decode(options(alone, "decode-0")).engine.utilisation == 0.9
    own = (("decode", "engine.device=cuda:1"), ("decode", "engine.utilisation=0.8"))
    apart = plan(ClusterSettings("org/model", device="cuda:0", extra=own, port=0))
    assert load_decode(options(apart, "decode-0")).engine.utilisation == 0.8


def test_set_reaches_its_kind_or_its_process_and_wins() -> None:
    made = plan(
        ClusterSettings(
            "org/model",
            decode=2,
            port=0,
            cache_bytes=1 << 26,
            extra=(("decode", "engine.step-tokens=77"), ("decode-1", "engine.cache-bytes=1MiB")),
        )
    )
    first, second = (load_decode(options(made, n)).engine for n in ("decode-0", "decode-1"))
    assert (first.step_tokens, second.step_tokens) == (77, 77)
    assert (first.cache_bytes, second.cache_bytes) == (1 << 26, 1 << 20)
    assert load_prefill(options(made, "prefill-0")).engine.step_tokens != 77


@pytest.mark.parametrize("flags", [[], ["--no-decode-prefix-cache"]], ids=["by default", "switched off"])
def test_decode_side_hits_can_be_switched_off(flags: list[str]) -> None:
    made = plan(
        settings_from(build_parser().parse_args(["up", "--model", "org/m", "--port", "0", "--decode", "2", *flags]))
    )
    assert load_prefill(options(made, "prefill-0")).engine.prefix_cache
    for name in ("decode-0", "decode-1"):
        assert load_decode(options(made, name)).engine.prefix_cache is not bool(flags)


def test_up_options_become_settings() -> None:
    argv = ["up", "--model", "org/m", "--served-model", "n", "--prefill", "3", "--decode", "2", "--port", "0"]
    argv += ["--cache-bytes", "2GiB", "--set", "router:a=b"]
    settings = settings_from(build_parser().parse_args(argv))
    assert settings == ClusterSettings(
        "org/m", "n", prefill=3, decode=2, port=0, cache_bytes=2 << 30, extra=(("router", "a=b"),)
    )


@pytest.mark.parametrize(("model", "name"), [("org/model", "model"), ("a/b/tiny/", "tiny")])
def test_served_name_is_the_last_part(model: str, name: str) -> None:
    assert ClusterSettings(model).served_name == name
