"""One request inside the engine: what it has, where it stands, and what ends it."""

import time
from dataclasses import dataclass, field, replace
from enum import Enum

from twinflow.cache.base import Holding, Match
from twinflow.contracts.checkpoints import CheckpointKind, checkpoint_positions
from twinflow.contracts.errors import BadRequest, Internal, TwinflowError
from twinflow.contracts.hashing import TokenChain, unpack_tokens
from twinflow.contracts.requests import FinishReason, GenerateRequest, RequestStats, Sample
from twinflow.engine.base import STEP_S, Matched, Mode, Submit
from twinflow.engine.sampling import Drawn, ending_ids
from twinflow.grammar.guide import Guide
from twinflow.kernels.base import STATE_CHUNK_TOKENS
from twinflow.transfer.base import PeerArena
from twinflow.transfer.intake import Intake


class Phase(Enum):
    COMPILING = "compiling"  # its grammar is being made ready; holds nothing
    MATCHED = "matched"  # CLAIM: holds its attention hit, waits for the front's decision
    WAITING = "waiting"  # in the queue for memory
    PULLING = "pulling"  # has memory; bytes are arriving, nothing of them is used
    RUNNING = "running"  # in the step loop
    LEASED = "leased"  # OFFER: computed, kept for the reader


@dataclass(slots=True)
class Sequence:
    """Owned by the engine's loop. `chain` = prompt, forced and generated tokens; the last generated one is not fed yet.

    `started_s` and `waiting_since_s` are monotonic times. `announced_blocks` counts prompt blocks offered to the reader.
    What steps in flight feed and draw is in `flying_tokens` and `flying_draws` until they land; only then the cursor of the
    holding moves and the chain grows.
    """

    request: GenerateRequest
    mode: Mode
    chain: TokenChain
    phase: Phase
    id: str
    start_tokens: int  # to feed before the first new one is drawn: prompt, forced, and what lost hand-offs had sampled
    ends: frozenset[int]  # token ids that end it
    holding: Holding | None = None
    generated: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    waiting_since_s: float = field(default_factory=time.monotonic)
    have_tokens: int = 0
    want_checkpoint_at: int = 0  # OFFER: the reader wants the state there too; 0 = none
    announced_blocks: int = 0
    peer: PeerArena | None = None
    intake: Intake | None = None
    guide: Guide | None = None  # of a request with a grammar, from COMPILING on
    first: Sample | None = None  # decode side: sampled by the prefill worker, last of the chain, fed after adoption
    row: int | None = None  # of the persistent block tables
    flights: int = 0  # launched steps with it that have not landed
    failed: bool = False  # what it has computed is not to be used
    flying_tokens: int = 0
    flying_draws: int = 0
    preemptions: int = 0
    handoffs: int = 0  # begun so far
    received: bool = (
        False  # CLAIM: adopted from a peer, no step of it has landed since, its blocks are not published yet
    )
    joined_s: float = 0.0  # CLAIM: when that was (monotonic); 0 once it has drawn a token
    cuts: dict[int, CheckpointKind] = field(default_factory=dict)  # positions ahead whose states are kept, ascending
    cut: int | None = None  # the first of them
    stats: RequestStats = field(default_factory=RequestStats)

    @classmethod
    def submitted(cls, command: Submit, block_tokens: int) -> "Sequence":
        """Raises BadRequest where the two sides of a hand-off cannot mean the same prompt."""
        request, have = command.request, command.have_tokens
        chain = TokenChain(request.root, block_tokens, request.prompt + request.forced)
        forced = unpack_tokens(request.forced)
        start_tokens = request.prompt_tokens + len(forced)
        ends = frozenset(ending_ids(request.sampling))
        sequence = cls(request, command.mode, chain, Phase.WAITING, request.id, start_tokens, ends, generated=forced)
        sequence.have_tokens = have
        sequence.want_checkpoint_at = command.want_checkpoint_at
        if have % block_tokens or have > sequence.start_tokens:
            raise BadRequest(f"have_tokens={have} is no whole number of this prompt's blocks")
        return sequence

    @property
    def total_tokens(self) -> int:
        """The most it can ever hold; a prefill worker's part ends with the prompt."""
        if self.mode is Mode.OFFER:
            return self.start_tokens
        return max(self.request.max_total_tokens, self.start_tokens)

    def force(self, token_id: int, *, known: bool = False) -> None:
        """A token that somebody else sampled and the client has: a prefix now, never sampled again. `known`: it is in the chain
        already."""
        self.generated.append(token_id)
        if not known:
            self.chain.push(token_id)
        self.start_tokens += 1

    def needs_tokens(self, growth_tokens: int) -> int:
        """What it needs memory for to run on by `growth_tokens`: never more than its worst case."""
        return min(self.total_tokens, self.known_tokens + growth_tokens)

    @property
    def fed_tokens(self) -> int:
        """Landed or in flight."""
        assert self.holding is not None
        return self.holding.position + self.flying_tokens

    @property
    def known_tokens(self) -> int:
        """Tokens that can be fed: those of the chain, and those being drawn, which the device will know in time."""
        return self.chain.length + self.flying_draws

    @property
    def feedable_tokens(self) -> int:
        """What the next step may take of it. 0: nothing is left to feed, or the draw in flight is its last one, or the step
        in flight ends where its state is to be kept (the copy must come before the next token changes it)."""
        assert self.holding is not None
        fed = self.holding.position + self.flying_tokens
        if self.flying_tokens:
            if self.flying_draws and (
                self.mode is Mode.OFFER or len(self.generated) + self.flying_draws >= self.request.sampling.max_tokens
            ):
                return 0
            if fed == self.cut:
                return 0
        return self.chain.length + self.flying_draws - fed

    def plan_cuts(self, interval_tokens: int) -> None:
        """Once its states can be computed here, from the holding's position on: where they are worth keeping."""
        held = self.holding
        assert held is not None
        block_tokens = self.chain.block_tokens
        self.cuts = checkpoint_positions(
            held.position, held.written_tokens, self.start_tokens, block_tokens, interval_tokens, self.total_tokens
        )
        self.cut = next(iter(self.cuts), None)

    def plan_cut(self, position: int, kind: CheckpointKind) -> None:
        """One more."""
        self.cuts = dict(sorted({**self.cuts, position: kind}.items()))
        self.cut = next(iter(self.cuts))

    def pass_cut(self) -> CheckpointKind:
        """The next one is dealt with; why it was to be kept."""
        assert self.cut is not None
        kind = self.cuts.pop(self.cut)
        self.cut = next(iter(self.cuts), None)
        return kind

    def pass_cuts(self, start: int, end: int) -> dict[int, CheckpointKind]:
        """Those that a chunk from `start` to `end` comes by and can leave a state behind at are dealt with by it."""
        passed = {}
        while self.cut is not None and self.cut <= end and not (at := self.cut - start) % STATE_CHUNK_TOKENS:
            passed[start + at] = self.pass_cut()
        return passed

    def take(self, token_id: int) -> FinishReason | None:
        """The token that was drawn after all known ones: from here on it is known. Says whether it is the last one."""
        self.generated.append(token_id)
        self.chain.push(token_id)
        if self.joined_s:
            took = time.monotonic() - self.joined_s
            self.joined_s, self.stats = 0.0, replace(self.stats, extra={**self.stats.extra, STEP_S: took})
        if self.guide is not None:
            self.guide.follow(self.generated)
        return self.finish_of(token_id)

    def problem(self, drawn: Drawn) -> TwinflowError | None:
        """Why there is no token, or none that its grammar holds."""
        if drawn.error:
            return Internal(drawn.error)
        return None if self.guide is None else self.guide.error

    def finish_of(self, token_id: int) -> FinishReason | None:
        """Whether `token_id`, just appended to `generated`, is the last one."""
        params = self.request.sampling
        if self.guide is not None and (self.guide.complete or token_id in self.ends):
            return FinishReason.STOP  # where the grammar leaves nothing else, min_tokens has no say
        if token_id in self.ends and len(self.generated) >= params.min_tokens:
            return FinishReason.STOP
        if len(self.generated) >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def matched(self, found: Match) -> Matched:
        """A CLAIM that holds its hit: notes it, and says so."""
        assert self.holding is not None
        self.stats = RequestStats(
            prompt_tokens=self.start_tokens,
            decode_attention_tokens=found.attention_tokens,
            decode_checkpoints=found.checkpoints,
        )
        held = len(self.holding.blocks) * self.chain.block_tokens
        return Matched(self.id, found.hits, found.usable_tokens, held, self.start_tokens)

    def note_held(self) -> None:
        """A CLAIM holds more of its prompt than when it was matched."""
        assert self.holding is not None
        held_tokens = len(self.holding.blocks) * self.chain.block_tokens
        self.stats = replace(self.stats, decode_attention_tokens=held_tokens)

    def note_hits(self) -> None:
        """Records what `reserve` found here: on the prefill side of a hand-off, or on the worker that runs it alone."""
        held = self.holding
        assert held is not None
        self.stats = replace(self.stats, prompt_tokens=self.start_tokens, cached_tokens=held.resumed_tokens)
        if self.mode is Mode.OFFER:
            self.stats = replace(
                self.stats,
                prefill_attention_tokens=held.hit_attention_tokens,
                prefill_checkpoints=held.hit_checkpoints,
                prefill_resumed_tokens=held.resumed_tokens,
            )
        else:
            self.stats = replace(
                self.stats,
                route="local",
                decode_attention_tokens=held.hit_attention_tokens,
                decode_checkpoints=held.hit_checkpoints,
                decode_resumed_tokens=held.resumed_tokens,
            )
