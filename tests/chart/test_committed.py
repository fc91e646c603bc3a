"""What is committed is what the chart renders, and names no place that only its author has."""

import re

import pytest

from tools.chart.check import CHART, RENDERED, SCHEMA, VALUE_SETS, rendered, schema_text
from tools.chart.fetch import ROOT, Tools


@pytest.mark.parametrize("name", VALUE_SETS)
def test_rendered_manifests_are_current(tools: Tools, name: str) -> None:
    assert (RENDERED / f"{name}.yaml").read_text() == rendered(tools, name)


def test_the_schema_is_current() -> None:
    assert SCHEMA.read_text() == schema_text()


def test_install_commands_name_real_files() -> None:
    """Paths in docs/install.md exist."""
    page = (ROOT / "docs/install.md").read_text()
    paths = set(re.findall(r"\b(?:deploy|docs|models|constraints)/[\w./-]+\w", page))
    assert CHART.relative_to(ROOT).as_posix() in paths
    assert [p for p in paths if not (ROOT / p).exists()] == []
