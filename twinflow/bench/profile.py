"""Where a step's time goes: kernels by time, and how long the device was busy at all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Per unit of what was profiled: launches, and seconds over all of them."""

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """`busy_s` of `span_s` (first kernel's start to last one's end) something ran, per unit."""

    busy_s: float
    span_s: float
    kernels: tuple[KernelTime, ...]  # longest first


def profiled(run: Callable[[], object], device: str, units: int) -> Profile:
    """Profiles `run`, which does `units` of something. On CPU: operators instead of kernels."""
    on_gpu = torch.device(device).type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in recorded.events() or ()
        if e.device_type == wanted and (on_gpu or e.cpu_parent is None)
    ]
    return summarise(events, units)


def summarise(events: Iterable[tuple[str, float, float]], units: int) -> Profile:
    """events (name, start, end) in microseconds, in any order, overlapping or not."""
    spans = sorted((start, end) for _, start, end in events)
    if not spans:
        return Profile(0.0, 0.0, ())
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    times: dict[str, list[float]] = {}
    for name, start, end in events:
        times.setdefault(name, []).append(end - start)
    kernels = [KernelTime(name, len(each) / units, sum(each) / units / 1e6) for name, each in times.items()]
    kernels.sort(key=lambda k: k.seconds, reverse=True)
    return Profile(busy / units / 1e6, (reached - spans[0][0]) / units / 1e6, tuple(kernels))
