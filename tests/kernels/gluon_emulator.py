"""Runs a Gluon kernel on the CPU: what it does, not how. Triton's interpreter knows no Gluon.

`load(path)` executes a module with stand-ins for `triton.experimental.gluon`: its kernels run where they are launched. A
partition is a thread. Products are done when they are waited for and no sooner, so that operands which were overwritten too
early, or results which were read too early, show; copies are done at once. Layouts are taken as they are given.
"""

import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

WAIT_S = 8.0  # of a partition for another; longer is a deadlock


@dataclass
class Pointer:
    data: torch.Tensor  # flat
    at: Any = 0

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.data, self.at + more)


@dataclass
class Descriptor:
    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def block(self, corner: list[int]) -> torch.Tensor:
        view = torch.as_strided(self.base, self.shape, self.strides, self.base.storage_offset())
        got = view.new_zeros(self.block_shape)
        spans = [(c, min(c + b, n)) for c, b, n in zip(map(int, corner), self.block_shape, self.shape, strict=True)]
        if all(low < high for low, high in spans):
            part = view[tuple(slice(low, high) for low, high in spans)]
            got[tuple(slice(0, n) for n in part.shape)] = part
        return got


@dataclass
class Shared:
    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.data.narrow(0, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.data.dtype
        self.data.copy_(value)


class Barriers:
    """Of one program; a barrier is known by where it lies."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.states: dict[int, SimpleNamespace] = {}
        self.failed = False

    def init(self, bar: Shared, count: int) -> None:
        self.states[bar.data.data_ptr()] = SimpleNamespace(phase=0, count=count, missing=count, due=0)

    def change(self, bar: Shared, arrivals: int, due_bytes: int) -> None:
        with self.changed:
            state = self.states[bar.data.data_ptr()]
            state.missing -= arrivals
            state.due += due_bytes
            assert state.missing >= 0
            if state.missing == 0 and state.due == 0:
                state.phase, state.missing = state.phase ^ 1, state.count
                self.changed.notify_all()

    def wait(self, bar: Shared, phase: Any) -> None:
        state = self.states[bar.data.data_ptr()]
        with self.changed:
            came = self.changed.wait_for(lambda: self.failed or state.phase != int(phase), WAIT_S)
            assert came and not self.failed, "waits for what never comes"

    def fail(self) -> None:
        """Ends what other partitions wait for."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@dataclass
class Product:
    """One left running; `result` exists from the wait on."""

    run: Any
    number: int
    result: torch.Tensor | None = None


@dataclass
class Partition(threading.local):
    """What a thread has in flight."""

    issued: list[Product] = field(default_factory=list)
    finished: int = 0


class Program:
    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids, self.barriers, self.own = ids, Barriers(), Partition()

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        number = len(self.own.issued)

        def run() -> torch.Tensor:
            left, right = (x.data if isinstance(x, Shared) else x for x in (a, b))
            assert left.dtype == right.dtype
            total = left.float() @ right.float()
            # Products are done in order, so one may add to what is still in flight.
            return total + (self._done(acc) if isinstance(acc, Product) else acc) if use_acc else total

        self.own.issued.append(Product(run, number))
        return self.own.issued[-1]

    def mma_wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        until = max(self.own.finished, len(self.own.issued) - outstanding)
        for waited in self.own.issued[self.own.finished : until]:
            waited.result = waited.run()
        self.own.finished = until
        results = tuple(self._done(x) if isinstance(x, Product) else x for x in deps)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def _done(x: Product) -> torch.Tensor:
        assert x.result is not None, "read while in flight"
        return x.result

    def copy(self, source: Descriptor, corner: list[Any], bar: Shared, target: Shared) -> None:
        block = source.block(corner)
        target.data.copy_(block)
        self.barriers.change(bar, 0, -block.nbytes)

    def specialize(self, partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(partitions) - 1
        errors: list[BaseException] = []

        def guarded(run: Any, args: tuple[Any, ...]) -> None:
            try:
                run(*args)
                assert self.own.finished == len(self.own.issued), "left in flight"
            except BaseException as error:
                errors.append(error)
                self.barriers.fail()

        threads = [threading.Thread(target=guarded, args=p) for p in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    at = torch.as_tensor(pointer.at)
    live = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(at.shape)
    got = torch.full(at.shape, 0 if other is None else other, dtype=pointer.data.dtype)
    got[live] = pointer.data[at[live]]
    return got if got.dim() else got.item()


def _store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    assert value.dtype == pointer.data.dtype
    live = torch.ones_like(pointer.at, dtype=torch.bool) if mask is None else mask.expand(pointer.at.shape)
    pointer.data[pointer.at[live]] = value[live]


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else (a if condition else b)


class Kernel:
    """A function of the device, or with [grid] what the host launches."""

    def __init__(self, now: SimpleNamespace, run: Any) -> None:
        self._now, self._run = now, run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, **options: Any) -> None:
            given = [Pointer(_storage(x)) if isinstance(x, torch.Tensor) else x for x in args]
            for ids in product(*(range(n) for n in grid)):
                self._now.program = Program(ids)
                self._run(*given, **options)

        return launch


def _storage(x: torch.Tensor) -> torch.Tensor:
    """Flat, from where x begins to the end of its memory."""
    start = x.storage_offset()
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - start,), (1,), start)


def load(path: Path) -> ModuleType:
    now = SimpleNamespace(program=None)

    def shared(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        fill = float("nan") if dtype.is_floating_point else 0
        return Shared(torch.full(shape, fill, dtype=dtype))

    def expect(bar: Shared, size: int) -> None:
        now.program.barriers.change(bar, 1, size)

    def arrive(bar: Shared, pred: Any = True) -> None:
        if pred:
            now.program.barriers.change(bar, 1, 0)

    def wait(bar: Shared, phase: Any, pred: Any = True) -> None:
        if pred:
            now.program.barriers.wait(bar, phase)

    layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout")
    language = SimpleNamespace(
        constexpr=int,
        float32=torch.float32,
        int64=torch.int64,
        program_id=lambda axis: now.program.ids[axis],
        load=_load,
        store=_store,
        where=_where,
        arange=lambda low, high, layout: torch.arange(low, high),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        zeros_like=torch.zeros_like,
        convert_layout=lambda x, layout: x,
        static_range=range,
        thread_barrier=lambda: None,
        allocate_shared_memory=shared,
        warp_specialize=lambda *args: now.program.specialize(*args),
        **dict.fromkeys(layouts, lambda *args: None),
    )
    hopper = SimpleNamespace(
        fence_async_shared=lambda: None,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda bar, count: now.program.barriers.init(bar, count),
            expect=expect,
            arrive=arrive,
            wait=wait,
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=lambda *args: now.program.copy(*args)),
        warpgroup_mma=lambda *args, **options: now.program.mma(*args, **options),
        warpgroup_mma_wait=lambda outstanding, deps: now.program.mma_wait(outstanding, deps),
    )

    def jit(run: Any = None, **options: Any) -> Any:
        return Kernel(now, run) if run is not None else partial(Kernel, now)

    gluon = SimpleNamespace(jit=jit, language=language)
    stand_ins = {
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
    }
    before = {name: sys.modules.get(name) for name in stand_ins}
    module = ModuleType(path.stem)
    try:
        sys.modules.update(stand_ins)  # type: ignore[arg-type]
        exec(compile(path.read_text(), path, "exec"), module.__dict__)
    finally:
        for name, was in before.items():
            sys.modules.pop(name) if was is None else sys.modules.__setitem__(name, was)
    return module
