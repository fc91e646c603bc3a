"""The running sequences and the steps in flight: plans the next step, launches it, lands the oldest one.

    launch k+1 ─▶ land k ─▶ (commands, admission) ─▶ launch k+2 ─▶ land k+1 …        two in flight, on a GPU
    launch k+1 ─▶ land k ─▶ masks … draw k+1 ─▶ launch k+2 ─▶ land k+1 ─▶ masks …    with grammars among its draws

A mask depends on the token that the step before draws. The pass needs no mask: it runs while the masks are computed, and the
draws of the whole step follow. Nothing is drawn under a mask of another position, and nobody else waits for longer.

A sequence may end while a step that feeds it is in flight. It then takes part in no further one, and what it holds is given
back when that step has landed: until then its memory is written to, and its slot is ahead of its cursor.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from twinflow.engine.batch import Part
from twinflow.engine.config import EngineConfig
from twinflow.engine.guides import Guides, MaskJob
from twinflow.engine.runner import Flight, Runner
from twinflow.engine.sampling import Drawn, RowMasks
from twinflow.engine.schedule import SequenceView, plan_step
from twinflow.engine.sequence import Sequence


class StepFailed(Exception):
    """A step ended with `__cause__`; what it fed to `sequences` is lost. `fatal`: no further step can work either."""

    def __init__(self, sequences: Seq[Sequence], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.sequences = sequences
        self.fatal = isinstance(cause, torch.AcceleratorError)


class Steps:
    """Owned by the engine's loop. `running` is in order of arrival."""

    def __init__(self, runner: Runner, config: EngineConfig, guides: Guides | None = None) -> None:
        self.running: dict[str, Sequence] = {}
        self._runner = runner
        self._config = config
        self._flights: deque[Flight] = deque()
        self._leaving: list[tuple[Sequence, Callable[[], None]]] = []
        self._guides = guides
        self._masks: MaskJob | None = None  # of the youngest step in flight

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def occupied_rows(self) -> int:
        return len(self.running) + len(self._leaving)

    def prepare(self, sequence: Sequence, first: int) -> None:
        """What `enter` does on the device, ahead of it: no step takes the sequence yet. `first` is the last token of its chain,
        and will be its newest one by then. Where nobody else runs, the inputs of its first step too. Undone by `leave`."""
        self._runner.enter(sequence, [first])
        held = sequence.holding
        assert held is not None
        alone = not (self.running or self._flights)
        if alone and sequence.chain.length <= len(held.blocks) * sequence.chain.block_tokens:
            self._runner.ready(Part.last_of(sequence))

    def enter(self, sequence: Sequence) -> None:
        """The sequence has all that it needs and is fed from now on."""
        if sequence.row is None:
            self._runner.enter(sequence)
        self.running[sequence.id] = sequence

    def leave(self, sequence: Sequence, release: Callable[[], None]) -> None:
        """No further step takes it (it need not have been in any). `release` is called once no step in flight has it."""
        if self.running.get(sequence.id) is sequence:
            del self.running[sequence.id]
        if sequence.flights:
            self._leaving.append((sequence, release))
        else:
            self._runner.leave(sequence)
            release()

    def grow(self, sequence: Sequence, had_blocks: int) -> None:
        """The sequence's holding has grown from `had_blocks`."""
        self._runner.tables.extend(sequence, had_blocks)

    def launch(self) -> bool:
        """Launches the next step, if any sequence can be fed and what the last one draws is queued. Raises StepFailed."""
        self.draw()
        if self._flights and self._flights[-1].undrawn is not None:
            return False
        parts = self._plan()
        if not parts:
            return False
        if not self._flights:
            self._ask([p.sequence for p in parts if p.samples])
        try:
            self._flights.append(self._runner.launch(parts))
        except Exception as error:  # the edge of the loop: the step's requests end, the worker serves on
            self._take_masks()
            raise StepFailed([p.sequence for p in parts], error) from error
        return True

    def _plan(self) -> list[Part]:
        """What the next step feeds; nothing when no sequence can be fed."""
        ready = [(s, tokens) for s in self.running.values() if (tokens := s.feedable_tokens)]
        if len(ready) <= self._config.step_tokens and all(tokens == 1 for _, tokens in ready):
            return [Part.last_of(s) for s, _ in ready]  # as `plan_step` would have it, without a view of each
        views = [SequenceView(s.id, s.fed_tokens, s.known_tokens, s.cuts) for s, _ in ready]
        plan = plan_step(views, self._config.step_tokens, self._config.chunk_tokens)
        return [Part.next_of(self.running[c.id], c.tokens) for c in plan]

    def ask(self) -> None:
        """Has the masks of the step in flight computed, if it waits for its draws and every token before them is known."""
        if self._masks is None and self._waits_for_draws:
            parts = self._flights[0].plan.parts
            self._ask([parts[i].sequence for i in self._flights[0].plan.drawing])

    def draw(self) -> None:
        """Queues the draws of the step in flight that was launched without them, if every token before them is known."""
        if not self._waits_for_draws:
            return
        self.ask()
        flight = self._flights[0]
        try:
            self._runner.draw(flight, self._take_masks())
        except Exception as error:  # the edge of the loop: raised as StepFailed when the step lands
            flight.failure = error

    @property
    def _waits_for_draws(self) -> bool:
        return len(self._flights) == 1 and self._flights[0].undrawn is not None

    def _ask(self, drawing: Seq[Sequence]) -> None:
        """What is drawn for a sequence that has ended is dropped, whatever it is."""
        guided = [(i, s) for i, s in enumerate(drawing) if s.guide is not None and self._runs(s)]
        if guided:
            assert self._guides is not None
            self._masks = self._guides.masks(guided)

    def _take_masks(self) -> RowMasks | None:
        job, self._masks = self._masks, None
        return None if job is None else job.result()

    def must_land(self, launched: bool) -> bool:
        """Whether the oldest step is to be waited for now: as many as may be are in flight, or nothing can be launched
        before it has landed."""
        return self.in_flight >= self._config.flights or (not launched and self.in_flight > 0)

    def land(self) -> tuple[list[Sequence], list[tuple[Sequence, Drawn]]]:
        """Waits for the oldest step. Returns the sequences, still running, that it fed, and what it drew for them. Raises
        StepFailed."""
        self.draw()
        flight = self._flights.popleft()
        parts = flight.plan.parts
        try:
            drawn = self._runner.land(flight)
        except Exception as error:
            raise StepFailed([p.sequence for p in parts if self._runs(p.sequence)], error) from error
        finally:
            self._let_go()
        running = self.running
        fed = [s for p in parts if running.get((s := p.sequence).id) is s]
        return fed, [(s, one) for s, one in drawn if running.get(s.id) is s]

    def _runs(self, sequence: Sequence) -> bool:
        return self.running.get(sequence.id) is sequence

    def _let_go(self) -> None:
        if self._leaving:
            landed = [pair for pair in self._leaving if not pair[0].flights]
            self._leaving = [pair for pair in self._leaving if pair[0].flights]
            for sequence, release in landed:
                self._runner.leave(sequence)
                release()
