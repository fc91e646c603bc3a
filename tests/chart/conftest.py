"""Runs under `make chart` (`pytest -m chart`), which fetches helm; the other suites deselect these tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.chart.check import VALUE_SETS, render
from tools.chart.fetch import Tools, fetch

HERE = Path(__file__).parent
Manifest = dict[str, Any]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "chart: needs helm, which it fetches (make chart)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker("chart")
    if "chart" not in (config.option.markexpr or "").replace("not chart", ""):
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]


@pytest.fixture(scope="session")
def tools() -> Tools:
    return fetch()


@pytest.fixture(scope="session")
def manifests(tools: Tools) -> Callable[..., list[Manifest]]:
    """(value set, helm options …) → what helm renders."""
    seen: dict[tuple[str, ...], list[Manifest]] = {}

    def load(value_set: str, *options: str) -> list[Manifest]:
        key = (value_set, *options)
        if key not in seen:
            done = render(tools, *options, value_set=value_set)
            assert done.returncode == 0, done.stderr
            seen[key] = [m for m in yaml.safe_load_all(done.stdout) if m]
        return seen[key]

    return load


@pytest.fixture(params=VALUE_SETS)
def value_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)
