"""Triton's interpreter without the work it repeats: what a kernel computes, and every check of it, stays as it is.

For each operation of each program the interpreter builds anew what depends on a shape or a type alone, looks through whole
modules for each call of a device function, and works out whether integers overflow only to drop the answer, since that is
an assertion of its debug mode. Two thirds of a kernel's time in the interpreter went there. What is replaced belongs to one
release of Triton; under another its own interpreter runs, slower.
"""

import dataclasses
import inspect
from typing import Any

import pytest
import triton
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

RELEASE = "3.6.0"


def install(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    if triton.__version__ != RELEASE:
        return
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # there the overflow checks would count
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter, "_patch_builtin", _remember_builtins())
    patch.setattr(interpreter, "_patch_lang", _patch_once_per_launch(interpreter._patch_lang))
    patch.setattr(interpreter, "_get_np_dtype", _remember_dtypes(interpreter._get_np_dtype))
    patch.setattr(core, "_unwrap_if_constexpr", _unwrap_known_first(core._unwrap_if_constexpr))
    patch.setattr(core.dtype, "__eq__", _same_object_first(core.dtype.__eq__))
    patch.setattr(core.block_type, "__init__", _remember_blocks(core.block_type.__init__))
    patch.setattr(core.tensor, "__init__", _remember_shapes(core.tensor.__init__))


def _remember_builtins() -> Any:
    names: dict[object, list[str]] = {}

    def patch_builtin(package: object, builder: object, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # else an outer call has replaced it
                interpreter._patch_attr(package, name, member, builder, scope)

    return patch_builtin


def _patch_once_per_launch(slow: Any) -> Any:
    """The interpreter replaces the language's functions at a launch, and again, to no effect, at every device function."""
    seen_by: dict[object, frozenset[str]] = {}
    replaced: set[str] = set()

    def patch_lang(fn: Any) -> Any:
        if fn not in seen_by:
            modules = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, core)]
            seen_by[fn] = frozenset(m.__name__ for m in modules)
        if seen_by[fn] and seen_by[fn] <= replaced:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = slow(fn)
        replaced.update(seen_by[fn])
        restore = scope.restore

        def restore_all() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_lang


def _remember_dtypes(slow: Any) -> Any:
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = (kind.element_ty if isinstance(kind, core.block_type) else kind).name
        if name not in known:
            known[name] = slow(kind)
        return known[name]

    return np_dtype


def _unwrap_known_first(slow: Any) -> Any:
    plain = (core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool, str, type(None))
    as_they_are = frozenset(plain)

    def unwrap(value: Any) -> Any:
        return value if type(value) in as_they_are else slow(value)

    return unwrap


def _same_object_first(slow: Any) -> Any:
    return lambda self, other: self is other or slow(self, other)


def _remember_blocks(slow: Any) -> Any:
    known: dict[tuple[tuple[int, ...], str], tuple[Any, int, str]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(s.value if type(s) is core.constexpr else s for s in shape), str(element_ty)
        if key not in known:
            slow(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]

    return block_type


def _remember_shapes(slow: Any) -> Any:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            slow(self, handle, type)
            known[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[key]

    return tensor
