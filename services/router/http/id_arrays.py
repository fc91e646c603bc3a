"""Bodies whose JSON is mostly one array of token ids: no number of it ever becomes an object of Python's.

The array is cut out of the bytes and read by itself, into uint32; the rest, with a number in the array's place that is nowhere
else in it, is parsed as any body. If that number then stands where the array belongs, the array was one whole value there, and is
what the ordinary parser would have found. In all other cases (a key written with escapes or given twice, anything but whole
numbers from 0 to 2^32 - 1, JSON that is none) the ordinary parser has the body, and says what is wrong with it.
"""

import re
from typing import Any

import numpy as np
from pydantic_core import from_json
from simdjson import Array, Parser

from services.router.http.fields import Ids
from services.router.http.parse import parse_json

MIN_BYTES = 512  # of an array that is worth it
MAX_BYTES = 1 << 20  # of one whose parser's memory, some 20 B each at most, may stay
MOST = 2**32 - 1
PLACE = 7_406_313_860_158_249
_PLACE = b"%d" % PLACE


class IdArrays:
    """`parse` instead of `parse_json` where the ids are in `field`. Used from one thread."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._opening = re.compile(rb'"%s"[ \t\r\n]*:[ \t\r\n]*\[' % field.encode())
        self._parser = Parser()

    def parse(self, data: bytes) -> Any:
        """The same as `parse_json`, but for a long array of ids, which is `Ids`."""
        body = self._cut(data)
        return parse_json(data) if body is None else body

    def _cut(self, data: bytes) -> dict[str, Any] | None:
        """None: not for certain such a body."""
        opening = self._opening.search(data)
        if opening is None:
            return None
        start = opening.end() - 1
        end = data.find(b"]", start) + 1
        if not MIN_BYTES <= end - start <= MAX_BYTES:
            return None
        before, behind = data[:start], data[end:]
        if _PLACE in before or _PLACE in behind:
            return None
        ids = self._read(data[start:end])
        if ids is None:
            return None
        try:
            body = from_json(b"%b[%b]%b" % (before, _PLACE, behind), allow_inf_nan=False)
        except ValueError:
            return None
        found = body.get(self._field) if isinstance(body, dict) else None
        if not isinstance(found, list) or len(found) != 1 or type(found[0]) is not int or found[0] != PLACE:
            return None
        body[self._field] = ids
        return body

    def _read(self, array: bytes) -> Ids | None:
        try:
            parsed = self._parser.parse(array)
            assert isinstance(parsed, Array)
            numbers = np.frombuffer(parsed.as_buffer(of_type="u"), np.uint64)
        except (ValueError, TypeError, RuntimeError):  # the last of numbers beyond 64 bits
            return None
        finally:
            parsed = None  # the parser has one document at a time
        if not len(numbers) or (most := int(np.maximum.reduce(numbers))) > MOST:
            return None
        packed = numbers.astype("<u4").tobytes()
        return Ids(memoryview(packed).cast("I"), packed, most)
