"""One page of metrics from the registries of several processes: what they count is added up."""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Labels = tuple[tuple[str, str], ...]


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(processes: Sequence[Sequence[Metric]]) -> bytes:
    """In Prometheus' text format, in the order of the first process. Times of creation are the earliest."""
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for family in (f for families in processes for f in families):
        merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known = values.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if sample.name.endswith("_created"):
                known[key] = min(known.get(key, sample.value), sample.value)
            else:
                known[key] = known.get(key, 0.0) + sample.value
    for name, family in merged.items():
        family.samples = [Sample(n, dict(labels), value) for (n, labels), value in values[name].items()]
    return generate_latest(_Families(merged.values()))
