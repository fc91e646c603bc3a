"""One arena per device: attention blocks from its low end, state slots from its high end, each at its natural size.

`ArenaGeometry` is pure arithmetic, shared by the pools, the transfer plan and the handshake; `Arena` owns the bytes and
hands out strided views to the kernels. The arena is one plain allocation, never moved or shrunk while the process lives.

    0        block_bytes                                     total - slot_bytes    total
    | block 0 | block 1 | ... → blocks  ¦     slots ← ... | slot 1 | slot 0 |
                                        ¦ moves (`boundary.py`)
"""

from dataclasses import dataclass

import torch

from twinflow.cache.device_memory import allocate
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec

ALIGN_BYTES = 256

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Where blocks and slots lie. Addresses do not depend on where the boundary between both sides is.

    `blocks` and `slots` are the most that either side can ever have. Both at once need not fit: what is left of one side
    while the other has its most is its floor, which it keeps whatever happens.
    """

    total_bytes: int
    block_bytes: int
    slot_bytes: int
    blocks: int
    slots: int

    def __post_init__(self) -> None:
        for what, count, size in (("blocks", self.blocks, self.block_bytes), ("slots", self.slots, self.slot_bytes)):
            if count * size > self.total_bytes:
                raise ValueError(f"{count} {what} of {size} B do not fit into {self.total_bytes} B")

    @classmethod
    def split(
        cls, layout: CacheLayout, budget_bytes: int, slots: int, *, block_floor: int | None = None
    ) -> "ArenaGeometry":
        """At least `slots` state slots, and at least `block_floor` attention blocks (by default half of what is left beside
        those slots, at least one); what is between both floors goes to whoever needs it. Raises ValueError with the bytes
        needed when the budget is too small."""
        total = budget_bytes // ALIGN_BYTES * ALIGN_BYTES
        need = slots * layout.slot_bytes + (block_floor or 1) * layout.block_bytes
        if total < need:
            raise ValueError(
                f"cache budget of {budget_bytes} B is too small: {slots} slots of {layout.slot_bytes} B and "
                f"{block_floor or 1} blocks of {layout.block_bytes} B need {need} B; raise cache bytes or lower the "
                f"number of slots"
            )
        blocks = (total - slots * layout.slot_bytes) // layout.block_bytes
        floor = max(1, blocks // 2) if block_floor is None else block_floor
        return cls(
            total,
            layout.block_bytes,
            layout.slot_bytes,
            blocks,
            (total - floor * layout.block_bytes) // layout.slot_bytes,
        )

    @property
    def slot_floor(self) -> int:
        """Slots that there always are: those that fit beside the most blocks."""
        return min(self.slots, (self.total_bytes - self.blocks * self.block_bytes) // self.slot_bytes)

    @property
    def block_floor(self) -> int:
        """Blocks that there always are: those that fit beside the most slots."""
        return self.blocks_beside(self.slots)

    def blocks_beside(self, slots: int) -> int:
        """Blocks that fit while the other side has `slots` slots."""
        return min(self.blocks, (self.total_bytes - slots * self.slot_bytes) // self.block_bytes)

    def block_offset(self, block: int) -> int:
        """Bytes from the arena's base. Raises ValueError for a block that does not exist."""
        if not 0 <= block < self.blocks:
            raise ValueError(f"block {block} is outside 0..{self.blocks - 1}")
        return block * self.block_bytes

    def slot_offset(self, slot: int) -> int:
        """Bytes from the arena's base. Raises ValueError for a slot that does not exist."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside 0..{self.slots - 1}")
        return self.total_bytes - (slot + 1) * self.slot_bytes

    @property
    def slot_rows(self) -> int:
        """Rows of the kernels' view over slots; it spans the whole arena so that it survives a moved boundary."""
        return self.total_bytes // self.slot_bytes

    def slot_row(self, slot: int) -> int:
        """Row of `slot` in the kernels' view (rows ascend with the address, slots descend)."""
        return self.slot_rows - 1 - slot


class Arena:
    """The bytes of one device's cache and the views that kernels index. Owned by the engine process."""

    def __init__(self, layout: CacheLayout, geometry: ArenaGeometry, device: str = "cpu") -> None:
        self.layout = layout
        self.geometry = geometry
        self.storage = allocate(geometry.total_bytes, device)
        self._views = {(g.name, t.name): self._layer_views(g, t.name) for g in layout.groups for t in g.tensors}

    @property
    def base_address(self) -> int:
        return int(self.storage.data_ptr())

    def layers(self, group: str, tensor: str) -> list[torch.Tensor]:
        """Views of one tensor, one per layer of the group (in `layer_ids` order), sharing the arena's memory.

        ATTENTION: (blocks, *shape[:1], block_tokens, *shape[1:]), i.e. (blocks, kv_heads, block_tokens, head_dim).
        STATE: (slot_rows, *shape); index it with `geometry.slot_row(slot)`.
        """
        return self._views[group, tensor]

    def block_bytes(self, block: int) -> torch.Tensor:
        """uint8 view of one block."""
        at = self.geometry.block_offset(block)
        return self.storage[at : at + self.geometry.block_bytes]

    def slot_bytes(self, slot: int) -> torch.Tensor:
        """uint8 view of one slot."""
        at = self.geometry.slot_offset(slot)
        return self.storage[at : at + self.geometry.slot_bytes]

    def copy_slot(self, source: int, target: int) -> None:
        """Checkpoint or restore: copies a whole slot (all state layers) in stream order."""
        self.slot_bytes(target).copy_(self.slot_bytes(source))

    def copy_block(self, source: int, target: int) -> None:
        """Copy of a partial block before it is extended, in stream order."""
        self.block_bytes(target).copy_(self.block_bytes(source))

    def _layer_views(self, group: GroupSpec, tensor: str) -> list[torch.Tensor]:
        geometry = self.geometry
        spec = next(t for t in group.tensors if t.name == tensor)
        dtype = TORCH_DTYPES[spec.dtype]
        size = torch.empty((), dtype=dtype).element_size()
        tokens = group.block_tokens or 1
        before = 0
        for t in group.tensors:
            if t.name == tensor:
                break
            before += t.size_bytes * tokens
        layer_bytes = group.layer_bytes * tokens
        if group.kind is GroupKind.ATTENTION:
            shape = (spec.shape[0], tokens, *spec.shape[1:])
            base, units = 0, geometry.total_bytes // group.unit_bytes
        else:
            shape = spec.shape
            units = geometry.slot_rows
            base = geometry.total_bytes - units * geometry.slot_bytes
        for what, n in (("unit", group.unit_bytes), ("layer", layer_bytes), ("tensor", before), ("base", base)):
            if n % size:
                raise ValueError(f"{group.name}.{tensor}: {what} of {n} B is not aligned to {spec.dtype}")
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        flat = self.storage.view(dtype)
        return [
            torch.as_strided(
                flat,
                (units, *shape),
                (group.unit_bytes // size, *strides),
                (base + i * layer_bytes + before) // size,
            )
            for i in range(len(group.layer_ids))
        ]
