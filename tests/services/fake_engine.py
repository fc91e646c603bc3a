"""A scripted engine: no model, no memory, the protocol of `twinflow.engine.base` alone. Tests hold it at any step.

Tokens are f(prompt, position), so that the same request gives the same tokens wherever it runs. Block numbers are made up;
`prefill` offers one block per report, numbers 100, 101, …, and slot 7. With `at_once` the first token and the end of the prompt
are in one report, as a real engine tells them; `breaks`: with an error in place of the end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from twinflow.cache.base import PoolCounts
from twinflow.contracts.errors import Internal
from twinflow.contracts.events import CacheEvent, EventColumns
from twinflow.contracts.groups import GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import unpack_tokens
from twinflow.contracts.hits import GroupHit
from twinflow.contracts.requests import FinishReason, GenerateRequest, RequestStats, Sample
from twinflow.contracts.tags import StateTag
from twinflow.contracts.workers import Load
from twinflow.engine import base
from twinflow.engine.base import Command, Notice, Ready, Report
from twinflow.engine.config import EngineConfig
from twinflow.transfer.base import PeerArena

BLOCK_TOKENS = 4
VOCAB = 1000
SLOT = 7
GROUPS = (
    GroupSpec("attention", GroupKind.ATTENTION, (1,), (TensorSpec("k", (1, 4), "float32"),), BLOCK_TOKENS),
    GroupSpec("state", GroupKind.STATE, (0,), (TensorSpec("temporal", (2, 2), "float32"),)),
)
COUNTS = {"attention": PoolCounts(64, 50, 5, 8, 1, 2), "state": PoolCounts(8, 3, 2, 3, 0, 1)}
STEPS = ("match", "offer", "first", "prefilled", "pull", "tokens")


def token(prompt: bytes, position: int) -> int:
    return (sum(unpack_tokens(prompt)) + 17 * position) % VOCAB


def arena(config: EngineConfig, generation: int = 3) -> PeerArena:
    name = f"{config.worker_id}-{config.incarnation}"
    return PeerArena(
        config.worker_id, config.incarnation, generation, 4096, 1 << 20, 512, 1024, 2048, 1024, "DRAM", 0, name, b"meta"
    )  # fmt: skip


@dataclass
class Life:
    """One request in the fake: what commands have brought so far."""

    request: GenerateRequest
    decision: "asyncio.Future[Command]"
    first: "asyncio.Future[Sample]"
    finished: "asyncio.Future[base.PrefillFinished]"
    confirmed: "asyncio.Future[None]"
    announced: list[int] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None


class FakeEngine:
    """`EngineClient`. `hold(step)` stops every request before that step until `go(step)`."""

    def __init__(self, *, usable: int = 0, hold_tokens: int = 0, fingerprint: str = "f" * 32) -> None:
        self.usable = usable
        self.hold_tokens = hold_tokens
        self.fingerprint = fingerprint
        self.config: EngineConfig | None = None
        self.commands: list[Command] = []
        self.running: dict[str, Life] = {}
        self.closed = False
        self.deaf = False  # answers no questions
        self.unheard_s = 0.0  # as if its process had said nothing for so long
        self.flushed = False
        self.contents: tuple[CacheEvent, ...] = ()  # of its cache
        self.at_once = self.breaks = False
        self.on_step: Callable[[str, str], None] = lambda step, request_id: None
        self._gates = {step: asyncio.Event() for step in STEPS}
        for gate in self._gates.values():
            gate.set()
        self._passes: dict[str, asyncio.Semaphore] = {}
        self._queue: asyncio.Queue[Report | Exception | None] = asyncio.Queue()

    # ---- for tests ----

    def hold(self, step: str) -> None:
        self._gates[step].clear()

    def go(self, step: str) -> None:
        self._gates[step].set()

    def one_by_one(self, step: str) -> None:
        self._passes[step] = asyncio.Semaphore(0)

    def pass_one(self, step: str) -> None:
        """Lets one of those through that are held before it."""
        self._passes[step].release()

    def sent(self, kind: type) -> list:
        return [c for c in self.commands if isinstance(c, kind)]

    def kinds(self, request_id: str) -> list[str]:
        """Names of the commands about one request, in order."""
        return [type(c).__name__ for c in self.commands if id_of(c) == request_id]

    def die(self) -> None:
        self._queue.put_nowait(Internal("the engine process died"))

    def report(self, *notices: Notice, events: tuple[CacheEvent, ...] = ()) -> None:
        self._queue.put_nowait(
            Report(notices, EventColumns.of(events), Load(running=len(self.running), total_blocks=64), {})
        )

    # ---- EngineClient ----

    async def start(self, config: EngineConfig) -> Ready:
        self.config = config
        return Ready(
            model_id="fake",
            fingerprint=self.fingerprint,
            layout=f'{{"layout of": "{self.fingerprint}"}}',
            max_model_tokens=4096,
            max_request_tokens=512,
            block_tokens=BLOCK_TOKENS,
            vocab_size=VOCAB,
            eos_token_ids=(0,),
            groups=GROUPS,
            arena_bytes=1 << 20,
            arena=arena(config),
        )

    async def reports(self) -> AsyncIterator[Report]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            tasks = [life.task for life in self.running.values() if life.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._queue.put_nowait(None)

    def send(self, command: Command) -> None:
        self.commands.append(command)
        if self.deaf and isinstance(command, base.Inspect | base.MatchQuery | base.Flush):
            return
        life = self.running.get(id_of(command))
        match command:
            case base.Submit(request, mode):
                if life is None:
                    self._begin(request, mode, command.have_tokens)
            case base.Inspect(token):
                self.report(base.Inspected(token, COUNTS, {"attention": 5, "state": 2}, self._infos(), ""))
            case base.MatchQuery(token, _, prompt):
                hits = (
                    GroupHit("attention", GroupKind.ATTENTION, self.hold_tokens),
                    GroupHit("state", GroupKind.STATE, self.usable, (self.usable,) if self.usable else ()),
                )
                self.report(base.MatchFound(token, hits, min(self.usable, len(prompt) // 4 - 1)))
            case base.Flush(token, group):
                known = group in (None, *COUNTS)
                units = {g: c.cached for g, c in COUNTS.items() if group in (None, g)} if not self.flushed else {}
                self.flushed |= known
                self.report(base.Flushed(token, units, "" if known else f"unknown cache group {group!r}"))
            case base.Resync(token):
                self.report(base.CacheSnapshot(token, 5, EventColumns.of(self.contents)))
            case _ if life is None:
                pass
            case base.RunLocal() | base.PullFrom():
                life.decision.set_result(command)
            case base.BlocksAnnounced():
                life.announced += command.blocks
            case base.FirstTokenArrived(_, sample):
                life.first.set_result(sample)
                if sample.finish:
                    self._end(life, base.Done(life.request.id, self._stats(life)))
            case base.PrefillFinished():
                life.announced += command.blocks
                life.finished.set_result(command)
            case base.Confirm():
                life.confirmed.set_result(None)
            case base.HandoffFailed(_, reason, message):
                self._end(life, base.Done(life.request.id, self._stats(life), reason, message))
            case base.Cancel() | base.EndLease():
                self._end(life, base.Done(life.request.id, self._stats(life)))

    # ---- lives ----

    def _infos(self) -> tuple[base.SequenceInfo, ...]:
        return tuple(
            base.SequenceInfo(r.request.id, "claim", "matched", r.request.prompt_tokens, 3, 1, 0.5, 2, 1)
            for r in self.running.values()
        )

    def _begin(self, request: GenerateRequest, mode: base.Mode, have_tokens: int) -> None:
        future = asyncio.get_running_loop().create_future
        life = self.running[request.id] = Life(request, future(), future(), future(), future())
        flow = {
            base.Mode.LOCAL: lambda: self._generate(life, 0, "local"),
            base.Mode.CLAIM: lambda: self._claim(life),
            base.Mode.OFFER: lambda: self._offer(life, have_tokens),
        }[mode]
        life.task = asyncio.create_task(flow())

    def _end(self, life: Life, done: base.Done) -> None:
        self.running.pop(life.request.id, None)
        if life.task is not None and life.task is not asyncio.current_task():
            life.task.cancel()
        self.report(done)

    async def _step(self, step: str, life: Life) -> None:
        self.on_step(step, life.request.id)
        if step in self._passes:
            await self._passes[step].acquire()
        await self._gates[step].wait()
        await asyncio.sleep(0)

    async def _claim(self, life: Life) -> None:
        await self._step("match", life)
        r = life.request
        hits = (
            GroupHit("attention", GroupKind.ATTENTION, self.hold_tokens),
            GroupHit("state", GroupKind.STATE, self.usable, (self.usable,) if self.usable else ()),
        )
        self.report(base.Matched(r.id, hits, self.usable, self.hold_tokens, r.prompt_tokens))
        if isinstance(await life.decision, base.RunLocal):
            return await self._generate(life, 0, "local")
        await life.finished
        await self._step("pull", life)
        self.report(base.PullDone(r.id, tuple(life.announced), (life.finished.result().slot,)))
        await life.confirmed
        await life.first
        await self._generate(life, 1, "remote")

    async def _offer(self, life: Life, have_tokens: int) -> None:
        r = life.request
        have_blocks, full_blocks = have_tokens // BLOCK_TOKENS, r.prompt_tokens // BLOCK_TOKENS
        for index in range(have_blocks, full_blocks):
            await self._step("offer", life)
            self.report(base.Offered(r.id, index, (100 + index,), ()))
        await self._step("first", life)
        first = base.Generated(r.id, (self._sample(r, 0),))
        if self.breaks:
            self.running.pop(r.id, None)
            self.report(first, base.Done(r.id, self._stats(life), "internal", "it broke"))
            return
        if not self.at_once:
            self.report(first)
            await self._step("prefilled", life)
        tail = (100 + full_blocks,) if r.prompt_tokens % BLOCK_TOKENS else ()
        tag = StateTag(b"h" * 16, r.prompt_tokens, self.fingerprint)
        stats = RequestStats(
            prompt_tokens=r.prompt_tokens,
            cached_tokens=self.usable,
            prefill_attention_tokens=self.hold_tokens,
            prefill_checkpoints=(self.usable,),
            prefill_resumed_tokens=self.usable,
            extra={"prefill_s": 0.25},
        )
        end = base.Prefilled(r.id, max(have_blocks, full_blocks), tail, (), SLOT, 0, tag, stats)
        self.report(*((first, end) if self.at_once else (end,)))
        await asyncio.get_running_loop().create_future()

    async def _generate(self, life: Life, position: int, route: str) -> None:
        r = life.request
        while True:
            await self._step("tokens", life)
            sample = self._sample(r, position)
            plain = base.Continued((r.id,), (sample.token_id,))  # as an engine says it, but for logprobs
            notices: list[Notice] = [base.Generated(r.id, (sample,)) if sample.finish else plain]
            position += 1
            if sample.finish:
                self.running.pop(r.id, None)
                self.report(*notices, base.Done(r.id, self._stats(life)))
                return
            self.report(*notices)

    def _sample(self, r: GenerateRequest, position: int) -> Sample:
        last = position + 1 >= r.sampling.max_tokens
        return Sample(token(r.prompt, position), FinishReason.LENGTH if last else None)

    def _stats(self, life: Life) -> RequestStats:
        return RequestStats(
            prompt_tokens=life.request.prompt_tokens,
            decode_attention_tokens=self.hold_tokens,
            blocks_moved=len(life.announced),
            slots_moved=int(life.finished.done()),
            transport="fake",
            extra={"pull_s": 0.5},
        )


def id_of(command: Command) -> str:
    return command.request.id if isinstance(command, base.Submit) else getattr(command, "id", "")
