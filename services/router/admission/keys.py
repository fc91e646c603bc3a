"""API keys from a TOML file of SHA-256 hashes: whoever reads it can use no key. Keys are in no log and on no command line.

    [keys.team-a]
    sha256 = "…"              # or a list of them, while one key replaces another
    tenant = "a"              # default: the name
    requests_per_min = 600
    tokens_per_min = 2_000_000

    [anonymous]               # optional: what may be asked without a key
    concurrent = 2

The hash is plain, which is enough for keys that are random; `openssl rand -hex 32` makes one.
"""

import asyncio
import hashlib
import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from services.router.admission.base import ANONYMOUS, KeyFacts, Unauthorized
from twinflow.contracts.errors import BadRequest

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_WEIGHT = 1000.0
MAX_PRIORITY = 100

Stamp = tuple[int, int, int]  # of a file: what changes when it is replaced or written


@dataclass(frozen=True, slots=True)
class Keys:
    """`anonymous` None: nobody may ask without a key."""

    by_hash: Mapping[str, KeyFacts]
    anonymous: KeyFacts | None

    def find(self, authorization: str) -> KeyFacts:
        """`authorization` as in the HTTP header. Raises Unauthorized."""
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        if not authorization.strip():
            if self.anonymous is not None:
                return self.anonymous
            raise Unauthorized("no API key: send one in the header 'Authorization: Bearer KEY'")
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("the Authorization header must be 'Bearer KEY'")
        found = self.by_hash.get(hashlib.sha256(token.encode()).hexdigest())
        if found is None:
            raise Unauthorized("the API key is not known here")
        return found


def parse_keys(text: str, where: str) -> Keys:
    """Raises BadRequest that names file, key and field."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise BadRequest(f"{where}: {e}") from None
    unknown = document.keys() - {"keys", "anonymous"}
    if unknown:
        raise BadRequest(f"{where}: unknown {min(unknown)!r} (known: [keys.NAME] and [anonymous])")
    tables = document.get("keys", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise BadRequest(f"{where}: keys must be tables [keys.NAME]")
    by_hash: dict[str, KeyFacts] = {}
    for name, table in tables.items():
        if not NAME.fullmatch(name) or name == ANONYMOUS:
            raise BadRequest(f"{where}: {name!r} is no name for a key (letters, digits, '.', '_', '-'; at most 63)")
        at = f"{where}: [keys.{name}]"
        key = _facts(at, name, {k: v for k, v in table.items() if k != "sha256"}, tenant=name)
        for digest in _hashes(at, table.get("sha256")):
            if digest in by_hash:
                raise BadRequest(f"{at} has the same key as [keys.{by_hash[digest].name}]")
            by_hash[digest] = key
    anonymous = document.get("anonymous")
    if anonymous is not None and not isinstance(anonymous, dict):
        raise BadRequest(f"{where}: anonymous must be a table [anonymous]")
    if not by_hash and anonymous is None:
        raise BadRequest(f"{where} has neither a key nor [anonymous], so nobody could ask anything")
    nobody = None if anonymous is None else _facts(f"{where}: [anonymous]", ANONYMOUS, anonymous, tenant="")
    return Keys(by_hash, nobody)


def _hashes(at: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(v, str) and SHA256.fullmatch(v) for v in values)
    ):
        raise BadRequest(
            f"{at} sha256 must be the SHA-256 of the key, 64 hex digits in lower case, or a list of them: "
            'printf %s "$KEY" | sha256sum'
        )
    return values


def _facts(at: str, name: str, table: Mapping[str, Any], tenant: str) -> KeyFacts:
    known = [f.name for f in fields(KeyFacts) if f.name != "name"]
    for field, value in table.items():
        if field not in known:
            raise BadRequest(f"{at} unknown {field!r} (known: sha256, {', '.join(known)})")
        problem = _problem(field, value)
        if problem:
            raise BadRequest(f"{at} {field}={value!r} {problem}")
    return KeyFacts(name, **{"tenant": tenant, **table})


def _problem(field: str, value: Any) -> str:
    """ "" = it is right."""
    number = type(value) in (int, float)
    match field:
        case "tenant":
            return "" if isinstance(value, str) and value else "must be text that is not empty"
        case "isolate":
            return "" if isinstance(value, bool) else "must be true or false"
        case "weight":
            return "" if number and 0 < value <= MAX_WEIGHT else f"must be more than 0, at most {MAX_WEIGHT:g}"
        case "max_priority":
            within = type(value) is int and -MAX_PRIORITY <= value <= MAX_PRIORITY
            return "" if within else f"must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        case "slo_ttft_s":
            return "" if number and 0 < value < float("inf") else "must be seconds, more than 0"
        case _:  # counts
            return (
                "" if type(value) is int and value >= 1 else "must be a whole number from 1; leave it out for no limit"
            )


_ANYBODY = KeyFacts(ANONYMOUS)


class KeyBook:
    """The keys that hold now. `watch` follows the file; one that cannot be read or is wrong changes nothing and is told in the
    log. Without a file anybody may ask, without limits."""

    def __init__(self, path: Path | None) -> None:
        """Raises BadRequest when the file cannot be used."""
        self._path = path
        self._stamp: Stamp | None = None
        self._keys: Keys | None
        self.failed_reloads = 0
        if path is None:
            self._keys = None
            return
        self._stamp = _stamp(path)
        self._keys = _read(path)
        log.info("%s", _told(path, self._keys))

    def find(self, authorization: str) -> KeyFacts:
        """Raises Unauthorized."""
        return _ANYBODY if self._keys is None else self._keys.find(authorization)

    async def watch(self, every_s: float) -> None:
        """Until cancelled."""
        while self._path is not None:
            await asyncio.sleep(every_s)
            self.reload()
        await asyncio.Event().wait()

    def reload(self) -> None:
        """Reads the file again if it has changed."""
        path = self._path
        if path is None:
            return
        seen, self._stamp = self._stamp, None  # None: it is gone, and read again as soon as it is back
        try:
            self._stamp = _stamp(path)
            if self._stamp != seen:
                self._keys = _read(path)
                log.info("%s", _told(path, self._keys))
        except BadRequest as e:
            if self._stamp is not None or seen is not None:  # told once
                self.failed_reloads += 1
                log.error("the API keys stay as they are: %s", e.message)


def _told(path: Path, keys: Keys) -> str:
    names = sorted({key.name for key in keys.by_hash.values()})
    return f"{path}: {len(names)} API keys ({', '.join(names[:20])}{', …' if len(names) > 20 else ''})"


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as e:
        raise BadRequest(f"cannot read the API keys {path}: {e.strerror}") from None
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _read(path: Path) -> Keys:
    try:
        return parse_keys(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise BadRequest(f"cannot read the API keys {path}: {e}") from None
