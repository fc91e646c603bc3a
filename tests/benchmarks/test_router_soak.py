"""What the soak says of memory."""

import pytest

from benchmarks.router_soak import growth


def test_what_fills_up_at_first_is_no_growth_and_a_leak_is() -> None:
    filling = [(1000 * i, 100.0 + min(50.0, 10.0 * i)) for i in range(40)]
    assert growth(filling) == 0
    leaking = [(n, mib + 0.003 * n) for n, mib in filling]
    assert growth(leaking) == pytest.approx(3.0)


@pytest.mark.parametrize("samples", [[(0, 100.0)], [(5, 100.0), (5, 200.0)]], ids=["one sample", "no answers"])
def test_nothing_to_compare_is_no_growth(samples: list[tuple[int, float]]) -> None:
    assert growth(samples) == 0
