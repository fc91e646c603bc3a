"""The contract of the hybrid cache, as the engine uses it.

Flow of one sequence: `match` → `reserve` → (`advance` per step, `commit` when a step's writes are done) → `release`.
Everything runs on the engine loop's thread; nothing here blocks, nothing here is asyncio.

Ownership: blocks and slots belong to exactly one of free, cached (in the tree, no reference), held (referenced, or
released but still touched by a launched step), doomed (released while I/O may still write to it). Per pool
`free + cached + held + doomed == total` after every call.

Steps: the engine numbers the forward passes it launches. `begin_step()` returns the number; `end_step(n)` says that the event
behind step n has fired. Memory released while step n was the last one launched becomes free (or evictable) only at
`end_step(n)`; without a launched, unfinished step it is free at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.events import CacheEvent
from twinflow.contracts.hashing import TokenChain
from twinflow.contracts.hits import GroupHit
from twinflow.contracts.tags import StateTag

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)


class Copier(Protocol):
    """Executes copies inside the arena, in stream order of the compute stream. `Arena` is the real one."""

    def copy_slot(self, source: int, target: int) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache holds of a prompt right now; stale as soon as anything else happens, `reserve` looks again.

    `attention_tokens` may end inside a block (where the prompt parts from a partial one, or at a checkpoint inside a full
    one) and may equal the prompt's length. `usable_tokens` is at most the prompt's length - 1.
    """

    hits: tuple[GroupHit, ...]
    attention_tokens: int
    checkpoints: tuple[int, ...]
    usable_tokens: int


@dataclass(slots=True)
class Holding:
    """What one request holds. Mutated only by the cache's verbs; the engine reads it.

    `blocks[i]` covers tokens [i*block_tokens, (i+1)*block_tokens) of `chain`. `written_tokens`: KV of [0, written_tokens)
    is valid in `blocks` (hit, received or computed). `position`: the slot's cursor, the tokens fed into the state; it is
    what the state in `slot` stands after. `resumed_tokens`: the position at which `reserve` restored the state.
    `checkpoint_slot` is held besides the running slot: a published checkpoint lent to a reader, or a private slot into which
    one is being received. `snapshots`: by position, ascending, the slots that launched steps write on their way, and why.
    """

    chain: TokenChain
    blocks: list[BlockId] = field(default_factory=list)
    slot: SlotId | None = None
    checkpoint_slot: SlotId | None = None
    snapshots: dict[int, tuple[SlotId, CheckpointKind]] = field(default_factory=dict)
    written_tokens: int = 0
    position: int = 0
    resumed_tokens: int = 0
    hit_attention_tokens: int = 0
    hit_checkpoints: tuple[int, ...] = ()
    published_blocks: int = 0  # full blocks of this holding offered to the tree so far
    released: bool = False

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """All that it holds a reference on."""
        one_each = (self.slot, self.checkpoint_slot, *(slot for slot, _ in self.snapshots.values()))
        return tuple(s for s in one_each if s is not None)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Of one pool, in units (blocks or slots): those on its side of the boundary now. `pinned_by_io` overlaps with held
    and doomed."""

    total: int
    free: int
    cached: int
    held: int
    doomed: int
    pinned_by_io: int


class Cache(Protocol):
    def match(self, chain: TokenChain) -> Match:
        """Per-group hits of `chain`'s tokens. Changes nothing (not even recency)."""
        ...

    def reserve(self, chain: TokenChain, total_tokens: int) -> Holding | None:
        """Everything a request of `total_tokens` (prompt + what it may generate) needs to run here, all groups or none.

        References the matched attention blocks, copies a matched partial block (or takes it over when `exclusive`), takes
        new blocks for the rest and one slot, and restores the deepest usable checkpoint into that slot (copied, or taken
        over when `exclusive` and nothing is lost by it). The holding then has position = resumed_tokens =
        usable tokens and written_tokens = attention reach >= position. Evicts unreferenced entries as needed, never
        those just matched. None = not now (nothing has changed); raises TooLong, with the numbers, if it can never fit.
        """
        ...

    def hold_prefix(self, chain: TokenChain) -> Holding:
        """References on the matched *full* attention blocks alone (for a hand-off); always succeeds, maybe with none."""
        ...

    def complete(self, holding: Holding, total_tokens: int) -> bool:
        """Turns a `hold_prefix` holding into one of `total_tokens` with a slot: all or nothing, False = not now.

        Raises TooLong if it can never fit. The slot's content is undefined until `adopt`.
        """
        ...

    def extend(self, holding: Holding, total_tokens: int) -> bool:
        """More blocks for a running holding, so that it has those of `total_tokens`: all or nothing, False = not now.

        Raises TooLong if it can never fit.
        """
        ...

    def adopt(self, holding: Holding, tag: StateTag) -> None:
        """Received bytes are confirmed: KV [0, tag.position) and the state in the slot are valid. Sets the cursor.

        Raises ValueError unless `tag` equals (chain.prefix_hash(position), position, own fingerprint).
        """
        ...

    def advance(self, holding: Holding, tokens: int) -> None:
        """The launched step feeds `tokens` more tokens (already in `chain`): moves the cursor and `written_tokens`.

        Raises ValueError beyond the chain's end or the reserved blocks.
        """
        ...

    def advance_each(self, holdings: Iterable[Holding]) -> None:
        """`advance` by one token, then `commit`, of each: what a step of decoding comes to when it has landed."""
        ...

    def commit(self, holding: Holding) -> None:
        """The writes behind the current cursor are done: publishes the full blocks below it. Never fails, never blocks.

        Where the tree already has such a block, the tree's stays and the holding's remains private.
        """
        ...

    def checkpoint(self, holding: Holding, kind: CheckpointKind = CheckpointKind.BOUNDARY) -> bool:
        """Copies the running state at the cursor (its writes are done, or ordered before the copy) into a slot of its
        own and publishes it. `kind`: why, from `checkpoint_positions`.

        Best effort: False when no slot is free, what would go for it is worth more, or the tree already has it.
        """
        ...

    def lend_checkpoint(self, holding: Holding, position: int) -> SlotId | None:
        """References the published checkpoint after `position` tokens of the holding's chain until `release`, so that
        another worker can read it; None where there is none. A holding lends one at most: asked again, the same."""
        ...

    def take_checkpoint_slot(self, holding: Holding, position: int) -> SlotId | None:
        """A slot into which a checkpoint at `position` can be received from outside the compute stream. Best effort: None
        when no slot is free or what would go for it is worth more. It is the holding's until stored or released."""
        ...

    def store_checkpoint(self, holding: Holding, tag: StateTag) -> bool:
        """What was received into the checkpoint slot is confirmed: publishes it, after the blocks below it. False, and
        the slot is given back, where the tree already has that state or I/O may still write to it. Raises ValueError unless
        `tag` names a position of this chain with valid KV, and where nothing was to be received."""
        ...

    def open_snapshots(self, holding: Holding, cuts: Mapping[int, CheckpointKind]) -> dict[int, SlotId]:
        """Private slots for states at positions, ascending, which the step launched next comes by and writes there:
        checkpoints without ending a chunk. Best effort, those worth most first: what is left out gets none. Raises ValueError
        unless all lie ahead of the cursor and of what is open already."""
        ...

    def close_snapshots(self, holding: Holding, upto: int) -> int:
        """The steps that came by positions up to `upto` have landed, and the cursor has moved there: publishes what they left
        in slots that were opened for it. Returns how many states the tree did not have by now."""
        ...

    def withdraw(self, holding: Holding) -> None:
        """What the holding was computed from or has computed is not to be trusted: unpublishes the blocks and states that it
        added, all that hangs below them, and of what it had hit, deepest first, whatever nothing else hangs below. What
        another holding references stays: that one fails by itself, or shows that it is sound. `release` without
        `donate` follows."""
        ...

    def release(self, holding: Holding, *, donate: bool) -> None:
        """Gives everything back; idempotent. `donate`: the running slot becomes the checkpoint at the cursor and the partial
        tail block is published with its valid tokens, without a copy (call only when the cursor's writes are verified,
        i.e. nothing is in flight beyond it). Unpublished units pinned by I/O become doomed until `unpin_io`.
        """
        ...

    def pin_io(self, blocks: Iterable[BlockId], slots: Iterable[SlotId]) -> None:
        """These units are destinations (or sources) of posted I/O; counted, one unpin per pin."""
        ...

    def unpin_io(self, blocks: Iterable[BlockId], slots: Iterable[SlotId]) -> None:
        """That I/O reached a terminal state; doomed units without pins become free."""
        ...

    def begin_step(self) -> int: ...

    def end_step(self, step: int) -> None:
        """Steps up to and including `step` are done."""
        ...

    def flush(self, group: str | None = None) -> int:
        """Drops every unreferenced cached entry, of one group or of all; returns how many units were freed.

        Raises BadRequest, naming the groups, for one that does not exist.
        """
        ...

    def drain_events(self) -> Sequence[CacheEvent]:
        """Events since the last call, in order, sequence without gaps."""
        ...

    def snapshot(self) -> tuple[int, Sequence[CacheEvent]]:
        """(last sequence number, one *Stored event per published block boundary and checkpoint): a router's resync."""
        ...

    def counts(self) -> dict[str, PoolCounts]:
        """By group name."""
        ...

    def stored(self) -> dict[str, int]:
        """By group name: units that the tree lists, referenced or not, i.e. blocks and checkpoints that can be hit."""
        ...

    def max_request_tokens(self) -> int:
        """The largest `total_tokens` that `reserve` can ever satisfy."""
        ...

    def check_integrity(self) -> None:
        """Full walk: accounting, reference counts, tree shape, addresses. Raises AssertionError naming what is wrong."""
        ...
