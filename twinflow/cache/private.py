"""`PrivateCache`: the same pools and rules, but nothing is published, so that no request finds what another one left.

For measuring what hits give (`engine.prefix_cache=false`). A request that yields its memory starts over from its tokens.
"""

from collections.abc import Mapping

from twinflow.cache.base import Holding, SlotId
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.checkpoints import CheckpointKind


class PrivateCache(HybridCache):
    """Implements `base.Cache`; the tree stays empty."""

    def commit(self, holding: Holding) -> None:
        self._require(holding)

    def checkpoint(self, holding: Holding, kind: CheckpointKind = CheckpointKind.BOUNDARY) -> bool:
        self._require(holding)
        return False

    def take_checkpoint_slot(self, holding: Holding, position: int) -> SlotId | None:
        self._require(holding)
        return None

    def open_snapshots(self, holding: Holding, cuts: Mapping[int, CheckpointKind]) -> dict[int, SlotId]:
        self._require(holding)
        return {}

    def release(self, holding: Holding, *, donate: bool) -> None:
        super().release(holding, donate=False)
