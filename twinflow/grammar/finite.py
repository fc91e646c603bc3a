"""Whether a JSON schema has an instance that ends: one whose required parts contain themselves has none. Pure."""

from typing import Any
from urllib.parse import unquote

MOST_STEPS = 20_000  # beyond, a schema is given the benefit of the doubt: its replies are cut by their length


def has_an_end(schema: Any) -> bool:
    """False only for what can never be fulfilled. Keywords that are not understood are passed over, and so are references that
    lead nowhere: the library refuses those."""
    return _Search(schema).ends(schema, ())


class _Search:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MOST_STEPS
        self._known: set[str] = set()  # references that end

    def ends(self, schema: Any, within: tuple[str, ...]) -> bool:
        """`within`: the references that are being followed. Coming back to one of them is no end."""
        self._left -= 1
        if self._left < 0 or not isinstance(schema, dict) or "enum" in schema or "const" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._known:
            if reference in within:
                return False
            if not self.ends(self._target(reference), (*within, reference)):
                return False
            self._known.add(reference)
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, list) and options and not any(self.ends(s, within) for s in options):
                return False
        every = schema.get("allOf")
        if isinstance(every, list) and not all(self.ends(s, within) for s in every):
            return False
        return self._type_ends(schema, within)

    def _type_ends(self, schema: dict[str, Any], within: tuple[str, ...]) -> bool:
        types = schema.get("type")
        if types == "object":
            required, properties = schema.get("required"), schema.get("properties")
            if not isinstance(required, list) or not isinstance(properties, dict):
                return True
            return all(self.ends(properties.get(name), within) for name in required if isinstance(name, str))
        least = schema.get("minItems")
        if types == "array" and isinstance(least, int) and least > 0:
            first = schema.get("prefixItems")
            parts = first[:least] if isinstance(first, list) else []
            rest = [schema.get("items")] if len(parts) < least else []
            return all(self.ends(s, within) for s in [*parts, *rest])
        return True

    def _target(self, reference: str) -> Any:
        """What a reference inside this document points to; None = nothing that is known here."""
        if not reference.startswith("#"):
            return None
        at = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            at = at.get(part) if isinstance(at, dict) else None
        return at
