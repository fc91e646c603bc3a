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
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from twinflow.contracts.errors import BadRequest

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

T = TypeVar("T")

Values = dict[str, dict[str, Any]]  # table → field → value


@dataclass(frozen=True, slots=True)
class Setting:
    """One field as it can be written: its type without `| None`, and what `--help` says of it."""

    kind: Any
    help: str


Fields = Mapping[str, Mapping[str, Setting]]  # table → field → setting


def setting(default: Any, help: str) -> Any:
    """A dataclass field with a text for `--help`: unit, what it does, why this default."""
    return dataclasses.field(default=default, metadata={"help": help})


def take(kind: type[T], values: dict[str, Any]) -> T:
    """A dataclass from those of the values that are its fields; they leave `values`."""
    return kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind) if f.name in values})  # type: ignore[arg-type]


def read_settings(
    prog: str,
    tables: Mapping[str, Sequence[type]],
    argv: Sequence[str],
    hidden: Collection[str] = (),
    description: str = "",
) -> Values:
    """`hidden` names fields (`table.field`) that the process fills in by itself. Raises BadRequest; exits on `--help` as
    argparse does."""
    fields_of = {table: settings_of(table, kinds, hidden) for table, kinds in tables.items()}
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; options given here win over it")
    for table, fields in fields_of.items():
        group = parser.add_argument_group(f"[{table}]") if table else parser
        for name, known in fields.items():
            dest, shown = f"{table}.{name}", metavar(known.kind)
            group.add_argument(option(table, name), dest=dest, metavar=shown, help=known.help)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    values: Values = read_file(path, fields_of) if path is not None else {table: {} for table in tables}
    for key, text in given.items():
        if text is not None:
            table, name = key.rsplit(".", 1)
            values[table][name] = convert(option(table, name), fields_of[table][name].kind, text)
    return values


def read_file(path: Path, fields_of: Fields) -> Values:
    """Raises BadRequest naming the file and the setting."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise BadRequest(f"cannot read the configuration {path}: {e}") from e
    top = {k: v for k, v in document.items() if not isinstance(v, dict)}
    sections = {"": top} | {k: v for k, v in document.items() if isinstance(v, dict)}
    values: Values = {table: {} for table in fields_of}
    for table, section in sections.items():
        if table not in fields_of:
            raise BadRequest(f"{path}: unknown table [{table}] (known: {', '.join(filter(None, fields_of))})")
        for name, value in section.items():
            if name not in fields_of[table]:
                known = ", ".join(fields_of[table])
                raise BadRequest(f"{path}: unknown setting {name!r} in [{table or 'top level'}] (known: {known})")
            values[table][name] = convert(f"{path}: {name}", fields_of[table][name].kind, value)
    return values


def settings_of(table: str, kinds: Sequence[type], hidden: Collection[str]) -> dict[str, Setting]:
    """Every field of the dataclasses that can be written as one value."""
    found: dict[str, Setting] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            if f"{table}.{field.name}" in hidden or dataclasses.is_dataclass(hint):
                continue
            if isinstance(hint, types.UnionType):
                hint = next(a for a in typing.get_args(hint) if a is not type(None))
            texts = [field.metadata.get("help", "")]
            if field.default not in (dataclasses.MISSING, None, "", ()):
                texts.append(f"default: {getattr(field.default, 'value', field.default)}")
            found[field.name] = Setting(hint, "; ".join(filter(None, texts)).replace("%", "%%"))
    return found


def option(table: str, name: str) -> str:
    return "--" + (f"{table}." if table else "") + name.replace("_", "-")


def metavar(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(m.value) for m in kind)
    if typing.get_origin(kind) is tuple:
        return "A,B"
    return {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}.get(kind, str(kind))


def convert(where: str, kind: Any, value: Any) -> Any:
    """Text or a TOML value as a field's type. Raises BadRequest naming `where`, the value and what is expected."""
    if typing.get_origin(kind) is tuple and isinstance(value, str | list):
        items = value.split(",") if isinstance(value, str) else value
        return tuple(convert(where, typing.get_args(kind)[0], i.strip() if isinstance(i, str) else i) for i in items)
    try:
        if isinstance(value, str) and kind is not str:
            return _parse(kind)(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    except (ValueError, KeyError):
        pass
    raise BadRequest(f"{where}: {value!r} is not {metavar(kind)}", param=where)


def _parse(kind: Any) -> Callable[[str], Any]:
    if kind is bool:
        return lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    return parse_int if kind is int else typing.cast(Callable[[str], Any], kind)


def parse_int(text: str) -> int:
    """`4096`, `4_096`, `256MiB`, `8G`: binary multiples. Raises ValueError or KeyError."""
    head = text.strip().rstrip("iB").rstrip("KMGTkmgt")
    return int(head) * SIZES[text.strip()[len(head) :].rstrip("iB").upper()]
