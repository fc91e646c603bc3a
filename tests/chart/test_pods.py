"""What every pod of the chart is held to, and what tells the roles apart."""

from collections.abc import Callable

import pytest

from tests.chart.parts import Manifest, containers, of_kind, pods, strings

Load = Callable[..., list[Manifest]]
REDIS = "--set=redis.enabled=true,redis.passwordSecret.name=redis-auth"
WORKERS = ("prefill", "decode")


def test_roles(manifests: Load, value_set: str) -> None:
    assert set(pods(manifests(value_set))) == {"router", "prefill", "decode", "test"}
    assert set(pods(manifests(value_set, REDIS))) == {"router", "prefill", "decode", "test", "redis"}


def test_pods_and_containers_are_confined(manifests: Load, value_set: str) -> None:
    for component, spec in pods(manifests(value_set, REDIS)).items():
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0, component
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, component
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, component
        assert not spec.get("hostNetwork") and not spec.get("hostPID") and not spec.get("hostIPC"), component
        for container in containers(spec):
            security = container["securityContext"]
            assert security == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]


def test_what_ends_is_started_again(manifests: Load, value_set: str) -> None:
    """By the kubelet, whose default is to: a worker that its transport has ended, a front that has lost its engine."""
    for component, spec in pods(manifests(value_set, REDIS)).items():
        expected = "Never" if component == "test" else "Always"
        assert spec.get("restartPolicy", "Always") == expected, component


def test_containers_have_resources(manifests: Load, value_set: str) -> None:
    for spec in pods(manifests(value_set, REDIS)).values():
        for container in containers(spec):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), container["name"]
            assert "memory" in container["resources"]["limits"], container["name"]


def test_services_have_three_probes(manifests: Load, value_set: str) -> None:
    for component, spec in pods(manifests(value_set, REDIS)).items():
        if component == "test":
            continue
        for container in spec["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert probe in container, (component, probe)


def test_liveness_asks_for_the_process_alone(manifests: Load, value_set: str) -> None:
    spec = pods(manifests(value_set))
    router = spec["router"]["containers"][0]
    assert router["livenessProbe"]["httpGet"] == {"path": "/live", "port": "http"}
    assert router["startupProbe"]["httpGet"] == {"path": "/live", "port": "http"}
    assert router["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    for role in WORKERS:
        worker = spec[role]["containers"][0]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert worker[probe]["grpc"] == {"port": 7100}


def test_a_model_may_load_for_half_an_hour(manifests: Load) -> None:
    for role, deployment in of_kind(manifests("gpu"), "Deployment").items():
        if role.endswith(WORKERS):
            probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
            loading_s = probe["periodSeconds"] * probe["failureThreshold"]
            assert loading_s == 1800
            assert deployment["spec"]["progressDeadlineSeconds"] > loading_s


def test_gpus_only_where_there_are_some(manifests: Load) -> None:
    gpu, cpu = pods(manifests("gpu")), pods(manifests("cpu"))
    for component, spec in gpu.items():
        limits = [c["resources"]["limits"].get("nvidia.com/gpu") for c in containers(spec)]
        assert limits == ([1] if component in WORKERS else [None] * len(limits)), component
    assert not any("gpu" in text or "cuda" in text for m in manifests("cpu") for text in strings(m))
    assert "tolerations" not in cpu["decode"]


def test_workers_advertise_their_pod(manifests: Load, value_set: str) -> None:
    for role in WORKERS:
        container = pods(manifests(value_set))[role]["containers"][0]
        env = {e["name"]: e for e in container["env"]}
        assert env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert "--advertise=$(POD_IP):7100" in container["args"]
        assert "--worker-id=$(POD_NAME)" in container["args"]
        assert env["UCX_NET_DEVICES"]["value"] == "eth0"
    v6 = pods(manifests(value_set, "--set=ipFamily=IPv6"))["decode"]["containers"][0]
    assert "--advertise=[$(POD_IP)]:7100" in v6["args"]


def test_writable_places_are_bounded(manifests: Load, value_set: str) -> None:
    for component, spec in pods(manifests(value_set, REDIS)).items():
        for volume in spec.get("volumes", []):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"], (component, volume["name"])
        if component in WORKERS:
            mounts = {m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
            assert {"/tmp", "/cache", "/dev/shm", "/etc/twinflow"} <= mounts


def test_pods_may_end_in_their_own_time(manifests: Load) -> None:
    gpu = pods(manifests("gpu", "--set-json=router.config.shutdown_s=42.5"))
    hook = gpu["router"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert gpu["router"]["terminationGracePeriodSeconds"] >= hook + 42.5 + 5
    for role, drain_s in (("prefill", 120), ("decode", 300)):
        command = gpu[role]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "/etc/twinflow/drain.py", "localhost:7100", str(drain_s)]
        assert gpu[role]["terminationGracePeriodSeconds"] >= drain_s + 10
    assert "lifecycle" not in pods(manifests("gpu", "--set=decode.drainSeconds=0"))["decode"]["containers"][0]
    assert pods(manifests("cpu"))["router"]["terminationGracePeriodSeconds"] >= 5 + 10 + 5


def test_labels(manifests: Load, value_set: str) -> None:
    for m in manifests(value_set, REDIS):
        labels = m["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "twinflow"
        assert labels["app.kubernetes.io/instance"] == "twinflow"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/component"] in ("router", "prefill", "decode", "redis", "test")
        assert m["metadata"]["name"].startswith("twinflow")
        if m["kind"] == "Deployment":
            selector = m["spec"]["selector"]["matchLabels"]
            template = m["spec"]["template"]["metadata"]["labels"]
            assert selector.items() <= template.items()
            assert "app.kubernetes.io/version" not in template, "a new chart alone must not restart workers"


def test_a_changed_setting_rolls_its_own_pods_only(manifests: Load) -> None:
    def sums(*options: str) -> dict[str, str]:
        return {
            name: d["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for name, d in of_kind(manifests("cpu", *options), "Deployment").items()
        }

    before, after = sums(), sums("--set=decode.config.engine.max_running=4")
    assert {name for name in before if before[name] != after[name]} == {"twinflow-decode"}


def test_pods_carry_what_the_operator_adds(manifests: Load) -> None:
    extra = (
        '--set-json=decode={"extraEnv":[{"name":"A","value":"b"}],"extraArgs":["--log-level=DEBUG"],'
        '"extraVolumes":[{"name":"v","emptyDir":{}}],"extraVolumeMounts":[{"name":"v","mountPath":"/v"}],'
        '"nodeSelector":{"disk":"fast"},"podLabels":{"team":"x"},"podAnnotations":{"note":"y"},"runtimeClassName":"nvidia",'
        '"addCapabilities":["IPC_LOCK"],"affinity":{"podAntiAffinity":{}},"podDisruptionBudget":{"enabled":true}}'
    )
    made = manifests("cpu", extra)
    spec = pods(made)["decode"]
    container = spec["containers"][0]
    assert {"name": "A", "value": "b"} in container["env"] and container["args"][-1] == "--log-level=DEBUG"
    assert {"name": "v", "mountPath": "/v"} in container["volumeMounts"] and {"name": "v", "emptyDir": {}} in spec[
        "volumes"
    ]
    assert spec["nodeSelector"] == {"disk": "fast"} and spec["runtimeClassName"] == "nvidia"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    meta = of_kind(made, "Deployment")["twinflow-decode"]["spec"]["template"]["metadata"]
    assert meta["labels"]["team"] == "x" and meta["annotations"]["note"] == "y"
    assert set(of_kind(made, "PodDisruptionBudget")) == {"twinflow-decode"}


@pytest.mark.parametrize("source", ["pvc", "hostPath", "image", "hub"])
def test_where_the_model_is(manifests: Load, source: str) -> None:
    options = {
        "pvc": "model.claim=models,model.path=qwen",
        "hostPath": "model.path=/data/qwen",
        "image": "model.path=/opt/qwen",
        "hub": "model.hubId=a/b,model.hubCacheClaim=hub",
    }
    spec = pods(manifests("gpu", f"--set=model.source={source},{options[source]}"))
    for role in ("router", *WORKERS):
        volumes = {v["name"]: v for v in spec[role]["volumes"]}
        mounts = {m["name"]: m for m in spec[role]["containers"][0]["volumeMounts"]}
        if source == "pvc":
            assert volumes["model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        if source == "hostPath":
            assert volumes["model"]["hostPath"] == {"path": "/data/qwen", "type": "Directory"}
        assert ("model" in mounts) == (source in ("pvc", "hostPath") or (source == "hub" and role == "router"))
        assert not mounts.get("model") or mounts["model"]["readOnly"]
    assert ("initContainers" in spec["router"]) == (source == "hub")
    assert any(v["name"] == "hub" for v in spec["decode"]["volumes"]) == (source == "hub")
