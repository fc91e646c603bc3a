"""The chart's values.schema.json, as Python data: what an operator may write, with types and a description of each value.

`config` comes from the services' own settings, so that a setting of a service is a value of the chart the moment it
exists, and nothing else is. Settings that the chart knows by itself (addresses, model, role) are left out: it sets them.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, get_args, get_origin

from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig
from services.router.config import RouterConfig
from twinflow.engine.config import EngineConfig
from twinflow.node.pulse import SessionTimes
from twinflow.node.registry.factory import RegistrySettings
from twinflow.node.settings import settings_of

Schema = dict[str, Any]

OWN_OF_REGISTRY = ("registry", "redis_url_env", "redis_prefix", "redis_ttl_s")
OWN_OF_WORKERS = (
    *OWN_OF_REGISTRY,
    "model",
    "worker_id",
    "role",
    "host",
    "port",
    "advertise",
    "router",
    "served_model",
    "incarnation",
    "metrics_host",
    "metrics_port",
)
OWN_OF_ROUTER = (
    *OWN_OF_REGISTRY,
    "model",
    "served_model",
    "http_host",
    "http_port",
    "grpc_host",
    "grpc_port",
    "local_max_tokens",
    "api_keys",
)

QUANTITY = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
SIZE = {"type": ["string", "integer"], "pattern": r"^[0-9]+([KMGT]i?B?)?$", "minimum": 0}


def say(description: str, schema: Mapping[str, Any]) -> Schema:
    return {"description": description, **schema}


def text(description: str, pattern: str = "", **more: Any) -> Schema:
    return {"description": description, "type": "string", **({"pattern": pattern} if pattern else {}), **more}


def name(description: str) -> Schema:
    """Of a Kubernetes object; may be empty."""
    return text(description, r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$")


def flag(description: str) -> Schema:
    return {"description": description, "type": "boolean"}


def whole(description: str, minimum: int = 0, maximum: int | None = None) -> Schema:
    limit = {} if maximum is None else {"maximum": maximum}
    return {"description": description, "type": "integer", "minimum": minimum, **limit}


def port(description: str) -> Schema:
    return whole(description, 1, 65535)


def share(description: str) -> Schema:
    """Of a rolling update or a disruption budget."""
    return {"description": description, "type": ["integer", "string"], "pattern": "^[0-9]+%?$", "minimum": 0}


def one_of(description: str, *values: str) -> Schema:
    return {"description": description, "type": "string", "enum": list(values)}


def record(description: str, required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with these keys and no others."""
    made = {"description": description, "type": "object", "additionalProperties": False, "properties": properties}
    return {**made, "required": list(required)} if required else made


def table(description: str) -> Schema:
    """Text → text: labels, annotations."""
    return {"description": description, "type": "object", "additionalProperties": {"type": "string"}}


def items(description: str, of: Schema) -> Schema:
    return {"description": description, "type": "array", "items": of}


def as_in(what: str) -> Schema:
    """An object of the Kubernetes API, which checks it."""
    return {"description": f"as in the Kubernetes API: {what}", "type": "object"}


# ---- the services' settings ----


def setting_schema(name: str, kind: Any, description: str) -> Schema:
    if get_origin(kind) is tuple:
        return items(description, setting_schema("", get_args(kind)[0], "one of them"))
    if kind is int and name.endswith("_bytes"):
        return say(f"{description}; bytes, or as 512MiB or 24GiB", SIZE)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return one_of(description, *(str(member.value) for member in kind))
    return {"description": description, "type": {int: "integer", float: "number", str: "string", bool: "boolean"}[kind]}


def table_schema(description: str, kinds: tuple[type, ...], left_out: tuple[str, ...] = ()) -> Schema:
    """Every setting of a service's dataclasses that an operator may give; described as `--help` does, or by its name."""
    hidden = [f".{name}" for name in left_out]
    properties = {}
    for name, known in settings_of("", kinds, hidden).items():
        help = known.help.replace("%%", "%") or name.replace("_", " ")
        properties[name] = setting_schema(name, known.kind, help)
    return record(description, **properties)


def worker_config(role: str, kind: type) -> Schema:
    schema = table_schema(f"settings of a {role} worker, by its own names", (kind, RegistrySettings), OWN_OF_WORKERS)
    schema["properties"]["engine"] = table_schema("[engine]", (EngineConfig,), OWN_OF_WORKERS)
    schema["properties"]["session"] = table_schema("[session]", (SessionTimes,))
    return schema


# ---- parts ----


def secret_key(description: str) -> Schema:
    return record(
        description,
        name=name("of the Secret; empty = none"),
        key=text("key in the Secret", r"^[-._a-zA-Z0-9]+$"),
    )


def image(description: str) -> Schema:
    return record(
        description,
        ("repository",),
        repository=text("with its registry, if any", r"^[a-z0-9]\S*$"),
        tag={"description": "empty = the chart's appVersion", "type": "string", "pattern": r"^[\w][\w.-]{0,127}$|^$"},
        digest=text("sha256:…; wins over the tag", r"^(sha256:[0-9a-f]{64})?$"),
        pullPolicy=one_of("when to pull", "IfNotPresent", "Always", "Never"),
    )


def resources() -> Schema:
    return record(
        "as in the Kubernetes API; a worker's GPU is a limit",
        requests=say("what is set aside", {"type": "object", "additionalProperties": QUANTITY}),
        limits=say("what is not passed", {"type": "object", "additionalProperties": QUANTITY}),
    )


def probe(description: str) -> Schema:
    return record(
        description,
        ("periodSeconds", "failureThreshold"),
        periodSeconds=whole("time between tries", 1),
        timeoutSeconds=whole("for one answer", 1),
        failureThreshold=whole("failures in a row that count", 1),
    )


def env() -> Schema:
    """A secret by reference only: a name that looks like one may not have a value of its own."""
    reference = {"type": "object"}
    source = record(
        "where the value comes from, as in the Kubernetes API",
        secretKeyRef=say("a key of a Secret", reference),
        configMapKeyRef=say("a key of a ConfigMap", reference),
        fieldRef=say("a field of the pod", reference),
        resourceFieldRef=say("a resource of the container", reference),
    )
    item = record("a variable", ("name",), name=text("of the variable"), value=text("plain"), valueFrom=source)
    looks_secret = r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY)$"
    item["if"] = {"properties": {"name": {"pattern": looks_secret}}}
    item["then"] = {"properties": {"value": False}}
    return items("environment of the container; secrets only by valueFrom.secretKeyRef", item)


def toleration() -> Schema:
    return record(
        "a toleration",
        key=text("of the taint"),
        operator=one_of("how to compare", "Exists", "Equal"),
        value=text("of the taint"),
        effect=one_of("of the taint", "NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds=whole("how long, with NoExecute"),
    )


def pod() -> dict[str, Schema]:
    """What every role can have."""
    return {
        "resources": resources(),
        "tmpSize": say("limit of /tmp", QUANTITY),
        "probes": record(
            "as in the Kubernetes API; what is asked is fixed",
            startup=probe("until it first answers: the time to load is periodSeconds × failureThreshold"),
            liveness=probe("the process alone answers; restarted otherwise"),
            readiness=probe("a router: some worker can decode; a worker: loaded and warm"),
        ),
        "serviceAccount": record(
            "under which the pod runs",
            create=flag("make one"),
            name=name("empty = release and role, or the namespace's default when none is made"),
            annotations=table("of the account"),
            automountToken=flag("give pods a token for the Kubernetes API; nothing here needs one"),
        ),
        "podDisruptionBudget": record(
            "limits what a node drain may evict at once",
            enabled=flag("make one"),
            maxUnavailable=share("pods at once, or a percentage"),
        ),
        "extraEnv": env(),
        "extraArgs": items(
            "after the chart's own arguments, so they win; visible to anybody who sees the pod: no secrets",
            text("--option=value", r"^--[a-z]"),
        ),
        "extraVolumes": items("further volumes", as_in("Volume")),
        "extraVolumeMounts": items("where they are mounted", as_in("VolumeMount")),
        "addCapabilities": items("all are dropped; these are added, e.g. IPC_LOCK for RDMA", text("one", r"^[A-Z_]+$")),
        "podLabels": table("of the pods"),
        "podAnnotations": table("of the pods"),
        "nodeSelector": table("labels of the nodes to run on"),
        "tolerations": items("taints of nodes that do not matter", toleration()),
        "affinity": record(
            "which nodes and neighbours are wanted",
            nodeAffinity=as_in("NodeAffinity"),
            podAffinity=as_in("PodAffinity"),
            podAntiAffinity=as_in("PodAntiAffinity"),
        ),
        "topologySpreadConstraints": items("how pods spread over nodes", as_in("TopologySpreadConstraint")),
        "priorityClassName": name("of the pods"),
        "runtimeClassName": name("of the pods, e.g. nvidia where that is not the nodes' default"),
    }


def worker(role: str, config: Schema, replicas: Schema) -> Schema:
    return record(
        f"{role} workers: one pod per GPU",
        replicas=replicas,
        config=config,
        strategy=record(
            "of an update; without a spare GPU a surge waits for ever",
            maxSurge=share("pods more than replicas"),
            maxUnavailable=share("pods less than replicas"),
        ),
        drainSeconds=whole("how long a worker may take to finish what it has before it is ended; 0 = ended at once"),
        shmSize=say("of /dev/shm, for UCX; counts towards the memory limit", QUANTITY),
        cacheSize=say("limit of /cache: a model from the hub, compiled kernels", QUANTITY),
        **pod(),
    )


def model() -> Schema:
    made = record(
        "what is served; the router reads its tokenizer, the workers its weights",
        ("name", "source"),
        name=text("as clients say it", r"^[A-Za-z0-9][\w.-]*$"),
        source=one_of("where it is", "hub", "pvc", "hostPath", "image"),
        hubId=text("hub: owner/name", r"^([\w-][\w.-]*/[\w.-]+)?$"),
        tokenSecret=secret_key("hub: the access token for a gated model"),
        hubCacheClaim=name("hub: a ReadWriteMany claim that keeps downloads; empty = each pod downloads"),
        claim=name("pvc: a claim with the model's folder"),
        path=text(
            "pvc: the folder in the claim; hostPath: the absolute folder on every node; image: the absolute folder in both images"
        ),
    )
    filled = {"type": "string", "minLength": 1}
    absolute = {"type": "string", "pattern": "^/"}
    needs = {
        "hub": {"hubId": filled},
        "pvc": {"claim": filled},
        "hostPath": {"path": absolute},
        "image": {"path": absolute},
    }
    made["allOf"] = [
        {"if": {"properties": {"source": {"const": source}}}, "then": {"properties": wanted}}
        for source, wanted in needs.items()
    ]
    return made


def values_schema() -> Schema:
    nixl_ports = record(
        "TCP ports from which NIXL (UCX) picks",
        first=port("of the range"),
        last=port("of the range"),
    )
    router = record(
        "the router: one pod",
        config=table_schema(
            "settings of the router, by its own names", (RouterConfig, RegistrySettings), OWN_OF_ROUTER
        ),
        service=record(
            "where clients connect",
            type=one_of("of the Service", "ClusterIP", "NodePort", "LoadBalancer"),
            port=port("of the Service"),
            annotations=table("of the Service"),
        ),
        apiKeys=secret_key(
            "API keys with their limits: a Secret with a file as docs/router.md has it; none = anybody may ask"
        ),
        testKey=secret_key(
            "the API key with which `helm test` asks, as it is; none = it asks nothing where keys are needed"
        ),
        preStopSeconds=whole("it still answers for so long while endpoints forget it, then shutdown_s begins"),
        **pod(),
    )
    made = record(
        "Values of the Twinflow chart",
        nameOverride=name("instead of the chart's name"),
        fullnameOverride=name("instead of release and chart name"),
        imagePullSecrets=items("secrets of private registries", record("one", ("name",), name=name("of the Secret"))),
        image=record(
            "the two images",
            router=image("of the router and the test: no torch"),
            engine=image("of the workers"),
        ),
        model=model(),
        ipFamily=one_of("of the pods' addresses", "IPv4", "IPv6"),
        ports=record(
            "on which containers listen",
            http=port("of the router, for clients"),
            registry=port("of the router, where workers register (gRPC)"),
            worker=port("of a worker (gRPC)"),
            metrics=port("of a worker, for Prometheus (/metrics)"),
            nixl=nixl_ports,
        ),
        nixl=record(
            "how attention blocks and states move",
            netDevices=text("UCX_NET_DEVICES: the pods' interface, and RDMA devices as mlx5_0:1,eth0", minLength=1),
            tls=text("UCX_TLS: transports that UCX may use; empty = it chooses"),
        ),
        registry=record(
            "how workers and the router find each other",
            kind=one_of("direct: workers dial the router; redis: all meet in a Redis", "direct", "redis"),
            redisPrefix=text("of every key; empty = namespace and release", r"^[A-Za-z0-9_.-]*$"),
            redisTtlSeconds=whole("redis: a worker that wrote nothing for so long, and has no session, is gone", 1),
            urlSecret=secret_key("the URL, redis://[user:password@]host:port/db; none = that of redis.enabled"),
        ),
        podSecurity=record(
            "under which ids all pods run",
            runAsUser=whole("never 0", 1),
            runAsGroup=whole("never 0", 1),
            fsGroup=whole("group of mounted volumes", 1),
            supplementalGroups=items("further groups, e.g. of RDMA devices", whole("one", 1)),
        ),
        router=router,
        prefill=worker("prefill", worker_config("prefill", PrefillConfig), whole("0 = decode workers prefill too")),
        decode=worker("decode", worker_config("decode", DecodeConfig), whole("at least one", 1)),
        networkPolicy=record(
            "who may dial whom",
            enabled=flag("refuse whatever the services do not need"),
            httpFrom=items("who may talk to the router's HTTP port; none = anybody", as_in("NetworkPolicyPeer")),
            metricsFrom=items("who may scrape the workers' metrics; none = anybody", as_in("NetworkPolicyPeer")),
        ),
        redis=record(
            "a small Redis of its own, for registry.kind=redis",
            enabled=flag("start one"),
            image=image("official image"),
            passwordSecret=secret_key("password, of letters and digits; none = whoever the network policy lets in"),
            maxMemory=text("as Redis writes it", "^[0-9]+(kb|mb|gb)$"),
            resources=resources(),
        ),
        extraObjects=items("further manifests, as templates of the chart", {"type": "object"}),
        **{"global": {"description": "Helm's own; nothing here reads it", "type": "object"}},
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Twinflow", **made}
