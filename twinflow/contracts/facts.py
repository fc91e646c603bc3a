"""`fact`: a frozen dataclass of which many are made.

A frozen dataclass guards itself against assignment at run time, which makes creating one three times as dear: each field is set
through `object.__setattr__`. The type checker refuses such assignments as well. A `fact` is frozen to the type checker and plain
at run time.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

__all__ = ["fact"]

if TYPE_CHECKING:
    from dataclasses import dataclass as fact
else:

    def fact(*, frozen: bool, slots: bool) -> Any:
        """As `dataclasses.dataclass`; both must be True. Equal ones have equal hashes, as frozen ones do."""
        assert frozen and slots, "a fact is frozen and has slots"
        return dataclasses.dataclass(slots=True, unsafe_hash=True)
