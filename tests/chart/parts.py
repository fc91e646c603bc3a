"""Finding things in manifests."""

from collections.abc import Iterator, Sequence
from typing import Any

Manifest = dict[str, Any]


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """Name → manifest."""
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Component → pod spec, of whatever makes pods."""
    found = {}
    for m in manifests:
        if m["kind"] == "Pod":
            found[m["metadata"]["labels"]["app.kubernetes.io/component"]] = m["spec"]
        elif m["kind"] == "Deployment":
            template = m["spec"]["template"]
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template["spec"]
    return found


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def strings(value: Any) -> Iterator[str]:
    """Every key and scalar of a manifest, as text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    else:
        yield str(value)


def matches(policy: Manifest, labels: Manifest) -> bool:
    return policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def allowed(policy: Manifest, port: int, labels: Manifest) -> bool:
    """Whether a pod of the same namespace with these labels may dial that port."""
    for rule in policy["spec"]["ingress"]:
        fits = any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
        peers = rule.get("from")
        if fits and (
            peers is None or any(p["podSelector"].get("matchLabels", {}).items() <= labels.items() for p in peers)
        ):
            return True
    return False
