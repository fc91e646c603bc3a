import torch

from twinflow.bench.profile import profiled, summarise


def test_busy_time_counts_overlaps_once_and_gaps_not_at_all() -> None:
    events = [("b", 30.0, 40.0), ("a", 0.0, 10.0), ("a", 5.0, 15.0), ("c", 6.0, 8.0)]
    found = summarise(events, units=2)
    assert (found.busy_s, found.span_s) == (12.5e-6, 20e-6)
    assert [(k.name, k.calls, k.seconds) for k in found.kernels] == [
        ("a", 1.0, 10e-6),
        ("b", 0.5, 5e-6),
        ("c", 0.5, 1e-6),
    ]


def test_nothing_ran() -> None:
    assert summarise([], units=1).kernels == ()


def test_operators_of_a_real_run() -> None:
    a = torch.randn(64, 64)
    found = profiled(lambda: [a @ a for _ in range(4)], "cpu", units=4)
    assert [k.calls for k in found.kernels if k.name == "aten::matmul"] == [1.0]
    assert 0 < found.busy_s <= found.span_s
