"""Who may dial whom, and where secrets may be."""

from collections.abc import Callable

import pytest

from tests.chart.parts import Manifest, allowed, containers, matches, of_kind, pods, strings

Load = Callable[..., list[Manifest]]
REDIS = "--set=redis.enabled=true,redis.passwordSecret.name=redis-auth"
TOKEN = "--set=model.tokenSecret.name=hub-token"
ROLES = ("router", "prefill", "decode", "redis", "test", "stranger")

# (from, to, port) that pods of the namespace may dial, with the chart's default of HTTP from this namespace.
DIALS = {
    *((peer, "router", 8000) for peer in ROLES),
    ("prefill", "router", 7000),
    ("decode", "router", 7000),
    ("router", "prefill", 7100),
    ("decode", "prefill", 7100),
    ("decode", "prefill", 18000),
    ("decode", "prefill", 18063),
    ("router", "decode", 7100),
    ("router", "redis", 6379),
    ("prefill", "redis", 6379),
    ("decode", "redis", 6379),
}


def labels(component: str) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "twinflow", "app.kubernetes.io/instance": "twinflow"}
    return {"app": "other"} if component == "stranger" else {**own, "app.kubernetes.io/component": component}


def test_network_policies(manifests: Load, value_set: str) -> None:
    policies = of_kind(manifests(value_set, REDIS), "NetworkPolicy").values()
    dials = set()
    for target in ("router", "prefill", "decode", "redis"):
        (policy,) = [p for p in policies if matches(p, labels(target))]
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for port in (8000, 7000, 7100, 17999, 18000, 18063, 18064, 6379):
            dials |= {(peer, target, port) for peer in ROLES if allowed(policy, port, labels(peer))}
    assert dials == DIALS


def test_clients_can_be_narrowed_but_the_test_stays(manifests: Load) -> None:
    narrow = '--set-json=networkPolicy.httpFrom=[{"podSelector":{"matchLabels":{"app":"gateway"}}}]'
    policy = of_kind(manifests("cpu", narrow), "NetworkPolicy")["twinflow-router"]
    assert allowed(policy, 8000, {"app": "gateway"}) and allowed(policy, 8000, labels("test"))
    assert not allowed(policy, 8000, labels("stranger"))
    anybody = of_kind(manifests("cpu", "--set-json=networkPolicy.httpFrom=[]"), "NetworkPolicy")["twinflow-router"]
    assert allowed(anybody, 8000, labels("stranger")) and not allowed(anybody, 7000, labels("stranger"))


def test_policies_can_be_off(manifests: Load) -> None:
    assert not of_kind(manifests("cpu", "--set=networkPolicy.enabled=false"), "NetworkPolicy")


def test_workers_reach_a_router_that_is_not_ready(manifests: Load, value_set: str) -> None:
    """It becomes ready by their registering."""
    services = of_kind(manifests(value_set), "Service")
    assert services["twinflow-registry"]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in services["twinflow"]["spec"]


def test_no_pod_gets_a_token_for_the_cluster(manifests: Load, value_set: str) -> None:
    made = manifests(value_set, REDIS)
    assert of_kind(made, "ServiceAccount").keys() == {f"twinflow-{r}" for r in ("router", "prefill", "decode", "redis")}
    assert all(a["automountServiceAccountToken"] is False for a in of_kind(made, "ServiceAccount").values())
    assert not [m for m in made if m["kind"] in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")]


def test_secrets_are_referenced_never_written(manifests: Load) -> None:
    made = manifests("gpu", REDIS, TOKEN)
    assert not [m for m in made if m["kind"] == "Secret"]
    references = {
        (e["name"], e["valueFrom"]["secretKeyRef"]["name"])
        for spec in pods(made).values()
        for c in containers(spec)
        for e in c.get("env", [])
        if "secretKeyRef" in e.get("valueFrom", {})
    }
    assert references == {("HF_TOKEN", "hub-token"), ("REDISCLI_AUTH", "redis-auth")}
    for m in made:
        if m["kind"] == "ConfigMap":
            assert not any("token_" in t or "password" in t for t in strings(m)), m["metadata"]["name"]
    for spec in pods(made).values():
        for c in containers(spec):
            args = " ".join(c.get("args", []))
            assert "$(HF_TOKEN)" not in args and "$(REDISCLI_AUTH)" not in args
            for e in c.get("env", []):
                looks_secret = e["name"].endswith(("TOKEN", "SECRET", "PASSWORD", "AUTH"))
                assert not (looks_secret and "value" in e), e["name"]


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_the_hub_token_goes_only_where_something_is_fetched(manifests: Load, role: str) -> None:
    spec = pods(manifests("gpu", TOKEN))[role]
    holders = [c["name"] for c in containers(spec) if any(e["name"] == "HF_TOKEN" for e in c.get("env", []))]
    assert holders == (["tokenizer"] if role == "router" else [role])
    assert "HF_TOKEN" not in list(strings(pods(manifests("cpu", TOKEN))[role]))


def test_api_keys_are_a_secret_that_only_the_router_sees(manifests: Load) -> None:
    made = manifests("cpu", "--set=router.apiKeys.name=our-keys,router.apiKeys.key=file,router.testKey.name=test-key")
    spec = pods(made)["router"]
    (volume,) = [v for v in spec["volumes"] if "secret" in v]
    assert volume["secret"] == {
        "secretName": "our-keys",
        "items": [{"key": "file", "path": "keys.toml"}],
        "defaultMode": 0o440,
    }
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["readOnly"] is True and "subPath" not in mount, "a mounted file would never change"
    file = of_kind(made, "ConfigMap")["twinflow-router"]["data"]["router.toml"]
    assert f'api_keys = "{mount["mountPath"]}/keys.toml"' in file
    env = {e["name"]: e for e in pods(made)["test"]["containers"][0]["env"]}
    assert env["KEY"]["valueFrom"]["secretKeyRef"] == {"name": "test-key", "key": "key"}
    assert not any("our-keys" in list(strings(pods(made)[role])) for role in ("prefill", "decode", "test"))
    without = manifests("cpu")
    assert "api_keys" not in "".join(of_kind(without, "ConfigMap")["twinflow-router"]["data"].values())
    assert not [v for v in pods(without)["router"]["volumes"] if "secret" in v]
    policy = of_kind(made, "NetworkPolicy")
    assert policy == of_kind(without, "NetworkPolicy")
