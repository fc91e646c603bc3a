"""Executes planned steps: inputs, forward pass, sampling, and what follows once the step is done.

    launch(parts) ── everything queued on the compute stream, nothing waited for ──▶ Flight ── land ──▶ drawn tokens

Where a sequence has a grammar, the draws are left out at first, and follow with `draw` once its mask is known. On a GPU the
engine launches the next step before the last one has landed: the drawn tokens that it feeds are read on the device. Cursors
move, blocks are published and states copied when a step lands, so nothing is ever named before it is written. Knows nothing of
requests' lives outside the step.
"""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from twinflow.cache.arena import TORCH_DTYPES, Arena
from twinflow.cache.base import Cache, Holding
from twinflow.contracts.workers import Role
from twinflow.engine.base import Work
from twinflow.engine.batch import BlockTables, Fields, Part, Plan, Shape, pack
from twinflow.engine.config import EngineConfig
from twinflow.engine.graphs import Captured, StepGraphs, step_shapes
from twinflow.engine.rehearsal import rehearsals
from twinflow.engine.sampling import Draw, Drawn, RowMasks, Sampler
from twinflow.engine.sequence import Sequence
from twinflow.engine.sharing import Sharing
from twinflow.kernels.base import Snapshots
from twinflow.kernels.paged_attention.shared import SharedPrefixes
from twinflow.models.base import ForwardBatch, HybridModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Undrawn:
    """What a step's draws need: its inputs and logits, and the positions of the tokens in their replies."""

    fields: Fields[torch.Tensor]
    logits: torch.Tensor
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A step's, on the device. `captured`: the graph whose buffer they are in; without one the step may have `shared`."""

    plan: Plan
    fields: Fields[torch.Tensor]
    captured: Captured | None
    shared: SharedPrefixes | None

    def are_of(self, plan: Plan) -> bool:
        """Of a single part: the very same one."""
        (mine,) = self.plan.parts
        return len(plan.parts) == 1 and plan.sequences[0] is mine.sequence and plan.parts[0][1:] == mine[1:]


@dataclass(slots=True)
class Flight:
    """A launched step. `event` fires behind everything that it queued; None where launching is doing. `failure`: of drawing,
    raised when it lands."""

    step: int
    plan: Plan
    undrawn: Undrawn | None  # until `Runner.draw`, which comes before any other launch
    draw: Draw | None = None
    event: torch.cuda.Event | None = None
    failure: Exception | None = None


class Runner:
    """Owned by the engine's loop."""

    def __init__(self, model: HybridModel, arena: Arena, cache: Cache, config: EngineConfig) -> None:
        self.model = model
        self.arena = arena
        self.cache = cache
        self.device = config.device
        self.work = Work()  # of the steps that landed
        self._block_tokens = model.layout.block_tokens
        blocks = -(-min(cache.max_request_tokens(), model.max_model_tokens) // self._block_tokens)
        rows = config.max_running
        self.tables = BlockTables(rows, max(1, blocks), self.device)
        self.sampler = Sampler(model.vocab_size, rows, self.device, model.kernels)
        self.graphs = StepGraphs(self.device)
        self._sharing = Sharing(self.tables, self._block_tokens)
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=self.device)  # by row: the last token drawn
        self._on_gpu = self.device != "cpu"
        self._ready: Inputs | None = None  # of a step that may be the next one
        largest = Shape(max(config.step_tokens, rows, 64), max(rows, 8))
        self._staging = [
            torch.empty(largest.size_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
            for _ in range(config.flights + 1)  # one more than can be on their way
        ]

    def prepare(self, config: EngineConfig) -> None:
        """On a GPU, before anything is served: compiles the kernels of sampling, for every option, captures the CUDA graphs of
        this worker's steps, and compiles what steps without a graph need."""
        self.sampler.warm_up(TORCH_DTYPES[self.model.layout.attention.tensors[0].dtype])
        graphs, decodes = config.cuda_graphs != "off", config.role is not Role.PREFILL

        def padding(shape: Shape, buffer: torch.Tensor) -> None:
            self._fill(Plan.of(()), shape, buffer)
            self._wait()

        with torch.inference_mode():
            if graphs:
                shapes = step_shapes(self.tables.rows, config.step_tokens, decodes=decodes)
                self.graphs.capture(self._forward, padding, shapes)
            began = time.monotonic()
            steps = rehearsals(
                self.tables.rows, config.step_tokens, config.chunk_tokens, decode_captured=graphs and decodes
            )
            for step in steps:
                shape = Shape(sum(step.lens), len(step.lens))
                buffer = torch.empty(shape.size_bytes, dtype=torch.uint8, device=self.device)
                padding(shape, buffer)
                shared = SharedPrefixes.none(shape.sequences, self.device) if step.shared else None
                self._forward(Fields.of(buffer, shape), shape, step.lens, shared, step.snapshots)
            self._wait()
            log.info("rehearsed %d steps in %.1f s", len(steps), time.monotonic() - began)

    def enter(self, sequence: Sequence, coming: Seq[int] = ()) -> None:
        """The sequence, with its memory, can take part in steps from now on. `coming`: tokens that it will have generated by the
        first one."""
        row = self.tables.assign(sequence)
        sampling = sequence.request.sampling
        if sequence.guide is not None:  # its masks see to it, so that they never leave nothing
            sampling = replace(sampling, min_tokens=0)
        self.sampler.start(row, sampling, sequence.request.prompt, [*sequence.generated, *coming])

    @torch.inference_mode()
    def ready(self, part: Part) -> None:
        """Inputs of a step of this part alone go to the device, where they serve if the next step is that one. The part feeds a
        known token into a block that is there; no step is in flight."""
        self._ready = self._inputs(Plan.of([part]))

    def leave(self, sequence: Sequence) -> None:
        """Only when no step in flight has it. Sequences without a row are ignored."""
        if self._ready is not None and self._ready.plan.sequences[0] is sequence:
            self._ready = None
        if sequence.row is not None:
            self.sampler.stop(sequence.row)
            self.tables.free(sequence)

    @torch.inference_mode()
    def launch(self, parts: Seq[Part]) -> Flight:
        """Queues a step, without its draws where one of them needs a mask. On an exception the step is over and none of its
        tokens counts as fed."""
        plan = Plan.of([p if p.tokens == 1 else self._with_snapshots(p) for p in parts])
        step = self.cache.begin_step()
        try:
            fields, logits = self._queue(plan)
            drawing = [plan.sequences[i] for i in plan.drawing]
            positions = tuple([len(s.generated) + s.flying_draws for s in drawing])
            flight = Flight(step, plan, Undrawn(fields, logits, positions))
            if all(s.guide is None for s in drawing):
                self._draw(flight, None)
        except BaseException:
            self._wait()
            self.cache.end_step(step)
            raise
        for part in plan.parts:
            sequence = part.sequence
            sequence.flights += 1
            sequence.flying_tokens += part.tokens
            sequence.flying_draws += part.samples
        return flight

    @torch.inference_mode()
    def draw(self, flight: Flight, masks: RowMasks | None) -> None:
        """Queues the draws of a step that was launched without them. `picks` of the masks are places in `plan.drawing`."""
        self._draw(flight, masks)

    def land(self, flight: Flight) -> list[tuple[Sequence, Drawn]]:
        """Waits for the step, moves cursors, publishes full blocks, keeps states at cuts; returns what was drawn.

        Flights land in the order of their launch. On an exception nothing of the step was published.
        """
        try:
            if flight.event is not None:
                flight.event.synchronize()
            if flight.failure is not None:
                raise flight.failure
            drawn = flight.draw.read() if flight.draw is not None else []
        finally:
            self.cache.end_step(flight.step)
            for part in flight.plan.parts:
                sequence = part.sequence
                sequence.flights -= 1
                sequence.flying_tokens -= part.tokens
                sequence.flying_draws -= part.samples
        self._advance(flight.plan)
        return [(flight.plan.sequences[i], one) for i, one in zip(flight.plan.drawing, drawn, strict=True)]

    def settle(self) -> None:
        """An empty step: copies that the cache has queued since the last one are done when it ends."""
        step = self.cache.begin_step()
        self._wait()
        self.cache.end_step(step)

    def _with_snapshots(self, part: Part) -> Part:
        """States that the chunk comes by and that are to be kept get their slots now; one without a slot is not kept."""
        cuts = part.sequence.pass_cuts(part.start, part.start + part.tokens)
        if not cuts:
            return part
        assert part.sequence.holding is not None
        slots = self.cache.open_snapshots(part.sequence.holding, cuts)
        return part._replace(snapshots=tuple((at - part.start, slot) for at, slot in slots.items()))

    def _advance(self, plan: Plan) -> None:
        """Moves the cursors over what a landed step has fed, does what is due there, and counts the tokens."""
        prefill_tokens = tokens = 0
        singles: list[Holding] = []
        at_cuts: list[Sequence] = []
        for part in plan.parts:
            sequence, holding = part.sequence, part.sequence.holding
            if holding is None or sequence.failed:
                continue
            tokens += part.tokens
            prefill_tokens += max(0, min(part.tokens, sequence.start_tokens - part.start))
            if sequence.received:  # a long prompt's blocks take longer to publish than a step: after its next token
                sequence.received = False
                self.cache.advance(holding, part.tokens)
            elif part.tokens == 1:
                singles.append(holding)
            else:
                self.cache.advance(holding, part.tokens)
                self.cache.commit(holding)
                if part.snapshots:
                    self.cache.close_snapshots(holding, part.start + part.tokens)
            if part.start + part.tokens == sequence.cut:
                at_cuts.append(sequence)
        self.cache.advance_each(singles)
        for sequence in at_cuts:
            assert sequence.holding is not None
            self.cache.checkpoint(sequence.holding, sequence.pass_cut())
        done = self.work
        decode_tokens = done.decode_tokens + tokens - prefill_tokens
        self.work = Work(done.steps + 1, done.prefill_tokens + prefill_tokens, decode_tokens)

    def _queue(self, plan: Plan) -> tuple[Fields[torch.Tensor], torch.Tensor]:
        """The forward pass on the stream: inputs and logits (at least as many rows as draw, vocab)."""
        ready, self._ready = self._ready, None
        inputs = ready if ready is not None and ready.are_of(plan) else self._inputs(plan)
        if inputs.captured is not None:
            inputs.captured.graph.replay()
            return inputs.fields, inputs.captured.logits
        draws = len(plan.drawing)
        logits = self._forward(
            inputs.fields, plan.shape, plan.lens, inputs.shared, plan.snapshots, plan.contexts, draws
        )
        return inputs.fields, logits

    def _inputs(self, plan: Plan) -> Inputs:
        """On their way to the device."""
        sequences = self.graphs.rung(plan.shape.sequences)
        shared = self._sharing.of(plan, sequences) if plan.decode_only else None
        captured = self.graphs.fit(plan, shared=shared is not None)
        if captured is not None:
            self._fill(plan, captured.shape, captured.buffer)
            if captured.shared is not None and shared is not None:
                captured.shared.copy_(shared)
            return Inputs(plan, captured.fields, captured, None)
        shape = plan.shape
        buffer = torch.empty(shape.size_bytes, dtype=torch.uint8, device=self.device)
        self._fill(plan, shape, buffer)
        return Inputs(plan, Fields.of(buffer, shape), None, None if shared is None else shared.to(self.device))

    def _fill(self, plan: Plan, shape: Shape, buffer: torch.Tensor) -> None:
        """Copies the step's inputs to `buffer` on the device."""
        staging = self._staging[0]
        self._staging.append(self._staging.pop(0))
        pack(plan, shape, Fields.of(staging.numpy(), shape), self.arena.geometry, self.tables)
        buffer.copy_(staging[: shape.size_bytes], non_blocking=True)

    def _forward(
        self,
        fields: Fields[torch.Tensor],
        shape: Shape,
        lens: tuple[int, ...],
        shared: SharedPrefixes | None,
        snapshots: bool,
        contexts: tuple[int, ...] | None = None,
        draws: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`contexts` None: they are known on the device alone, and the block tables have to be read in their full width.
        `out`: where the logits go."""
        tables = self.tables.table
        if contexts is not None:
            tables = tables[:, : (max(contexts) - 1) // self._block_tokens + 1]
        drawn = self._drawn.index_select(0, fields.sources.clamp(min=0))
        batch = ForwardBatch(
            input_ids=torch.where(fields.sources < 0, fields.ids, drawn),
            positions=fields.positions,
            cu_seqlens=fields.starts,
            seq_lens=lens,
            context_lens=fields.contexts,
            block_tables=tables.index_select(0, fields.rows),
            kv_slots=fields.kv_slots,
            state_rows=fields.state_rows,
            fresh=fields.fresh,
            logit_rows=fields.logit_rows[:draws],
            host_contexts=contexts,
            snapshots=(
                Snapshots(fields.snapshot_starts, fields.snapshot_after, fields.snapshot_rows) if snapshots else None
            ),
            shared=shared,
        )
        return self.model.forward(batch, self.arena, out)

    def _draw(self, flight: Flight, masks: RowMasks | None) -> None:
        """Draws, leaves the tokens where the next step finds them, and marks the end of what the step queues."""
        undrawn, flight.undrawn = flight.undrawn, None
        assert undrawn is not None
        drawing = [flight.plan.sequences[i] for i in flight.plan.drawing]
        if drawing:
            rows = [s.row for s in drawing if s.row is not None]
            logits = undrawn.logits[: len(rows)]
            flight.draw = self.sampler.launch(logits, rows, undrawn.positions, masks)
            self._drawn.index_copy_(0, undrawn.fields.draw_rows[: len(rows)], flight.draw.tokens)
        if self._on_gpu:
            flight.event = torch.cuda.Event()
            flight.event.record()

    def _wait(self) -> None:
        """Until everything queued on the compute stream is done. The CPU queues nothing."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
