"""Settings of a process from a TOML file and its command line, into plain values for frozen dataclasses.

Dataclasses make up tables: the one named "" holds the top level, the others a `[table]` and options `--table.field`. The
command line wins over the file. Only what was given is returned, so defaults live in the dataclasses alone.
"""

import argparse
import dataclasses
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from twinflow.contracts.errors import BadRequest

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Values = dict[str, dict[str, Any]]  # table → field → value


def read_settings(
    prog: str,
    tables: Mapping[str, Sequence[type]],
    argv: Sequence[str],
    hidden: Collection[str] = (),
    description: str = "",
) -> Values:
    """`hidden` names fields (`table.field`) that the process fills in by itself. Raises BadRequest; exits on `--help` as
    argparse does."""
    types_of = {table: field_types(table, kinds, hidden) for table, kinds in tables.items()}
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="TOML file; options given here win over it")
    for table, fields in types_of.items():
        for name, kind in fields.items():
            parser.add_argument(option(table, name), dest=f"{table}.{name}", metavar=metavar(kind))
    given = vars(parser.parse_args(argv))
    values: Values = {table: {} for table in tables}
    path = given.pop("config")
    if path is not None:
        values = read_file(path, types_of)
    for key, text in given.items():
        if text is not None:
            table, name = key.rsplit(".", 1)
            values[table][name] = convert(option(table, name), types_of[table][name], text)
    return values


def read_file(path: Path, types_of: Mapping[str, Mapping[str, Any]]) -> Values:
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise BadRequest(f"cannot read the configuration {path}: {e}") from e
    top = {k: v for k, v in document.items() if not isinstance(v, dict)}
    sections = {"": top} | {k: v for k, v in document.items() if isinstance(v, dict)}
    values: Values = {table: {} for table in types_of}
    for table, section in sections.items():
        if table not in types_of:
            raise BadRequest(f"{path}: unknown table [{table}] (known: {', '.join(filter(None, types_of))})")
        for name, value in section.items():
            if name not in types_of[table]:
                known = ", ".join(types_of[table])
                raise BadRequest(f"{path}: unknown setting {name!r} in [{table or 'top level'}] (known: {known})")
            values[table][name] = convert(f"{path}: {name}", types_of[table][name], value)
    return values


def field_types(table: str, kinds: Sequence[type], hidden: Collection[str]) -> dict[str, Any]:
    """Field → type of everything that can be written as one value."""
    simple: dict[str, Any] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f"{table}.{f.name}" not in hidden]
        simple |= {name: hints[name] for name in names if not dataclasses.is_dataclass(hints[name])}
    return simple


def option(table: str, name: str) -> str:
    return "--" + (f"{table}." if table else "") + name.replace("_", "-")


def metavar(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(m.value) for m in kind)
    return "A,B,…" if typing.get_origin(kind) is tuple else getattr(kind, "__name__", str(kind)).upper()


def convert(where: str, kind: Any, value: Any) -> Any:
    """Text or a TOML value as a field's type. Raises BadRequest naming `where`, the value and what is expected."""
    if typing.get_origin(kind) is types.UnionType:  # X | None
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    if typing.get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(convert(where, typing.get_args(kind)[0], i.strip() if isinstance(i, str) else i) for i in items)
    try:
        if isinstance(value, str) and kind is not str:
            return _parse(kind)(value)
        if isinstance(kind, type) and not issubclass(kind, Enum):
            if kind is float and type(value) is int:
                return float(value)
            if type(value) is kind:
                return value
    except (ValueError, KeyError):
        pass
    raise BadRequest(f"{where}: {value!r} is not a value of type {metavar(kind)}", param=where)


def _parse(kind: Any) -> Callable[[str], Any]:
    if kind is bool:
        return lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    return parse_int if kind is int else typing.cast(Callable[[str], Any], kind)


def parse_int(text: str) -> int:
    """`4096`, `4_096`, `256MiB`, `8G`: binary multiples. Raises ValueError or KeyError."""
    head = text.strip().rstrip("iB").rstrip("KMGTkmgt")
    return int(head) * SIZES[text.strip()[len(head) :].rstrip("iB").upper()]
