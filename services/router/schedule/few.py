"""The choice among few workers: what `options` and `cost` do with arrays, in plain numbers, one worker after the other.

For a handful of workers an array takes ten times what is computed in it. The formulas are those of `cost`, in the same order, so
that the choice is the same to the last bit; tests hold one against the other. Two numbers are compared in place: `min` and `max`
take as long as a function of ten lines. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from services.router.schedule.base import (
    LOCAL,
    NO_RATES,
    REMOTE,
    Candidate,
    Choice,
    Policy,
    Reason,
    RouteRequest,
    Snapshot,
    WorkerFacts,
)
from services.router.schedule.cost import (
    BLOCK_BYTES_PER_TOKEN,
    LINK_BYTES_PER_S,
    NOISE,
    OBSERVATIONS,
    PREFILL_TOKENS_PER_S,
    SLOT_BYTES,
    SOON,
    STEP_S,
    STEP_SLOPE_S,
    Cost,
)
from services.router.schedule.limits import limit_tokens
from services.router.schedule.options import DEFAULT_REPLY_TOKENS, MAX_CANDIDATES
from services.router.schedule.pick import least
from services.router.schedule.rates import Line, Rates, counted, uncounted
from twinflow.contracts.workers import BOTH, PREFILL

FEW = 8
MAX_OTHERS = 5  # alternatives that a choice tells

Terms = dict[str, float]


def can_choose(policy: Policy) -> bool:
    return isinstance(policy.scorer, Cost) and policy.picker is least


def choose_few(
    fitting: Sequence[WorkerFacts],
    kept: Sequence[WorkerFacts],
    snapshot: Snapshot,
    request: RouteRequest,
    policy: Policy,
    dropped: Mapping[str, str],
) -> Choice:
    """`fitting` are decode workers, `kept` all that are options. Both in the snapshot's order, `fitting` not empty."""
    random = _Ties(request.tie_seed)
    layouts: dict[str, list[WorkerFacts]] = {}
    for w in fitting:
        layouts.setdefault(w.record.fingerprint, []).append(w)
    seats = []
    for layout, decoders in layouts.items():
        seats += _Layout(decoders, kept, layout, snapshot, request, policy, random).seats()
    totals = [s.total for s in seats]
    lowest = min(totals)
    picked = random.one_of([i for i, total in enumerate(totals) if total <= lowest])
    order = sorted(range(len(seats)), key=totals.__getitem__)[: MAX_OTHERS + 1]
    others = [seats[i] for i in order if i != picked][:MAX_OTHERS]
    return seats[picked].choice({s.name: s.total for s in others}, dropped)


class _Ties:
    """The random numbers of `options` and `pick`, which are not even begun where nothing is equal."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random: Random | None = None

    @property
    def random(self) -> Random:
        if self._random is None:
            self._random = Random(self._seed)
        return self._random

    def one_of(self, equals: list[int]) -> int:
        return equals[0] if len(equals) == 1 and self._random is None else self.random.choice(equals)


@dataclass(slots=True)
class _Worker:
    """`reach` and `usable` as the policy reads them, `held` as it is."""

    facts: WorkerFacts
    fleet: Rates  # of all like it
    held: int  # tokens that it can resume from
    reach: float
    usable: float
    terms: Terms = field(default_factory=dict)  # by itself


@dataclass(slots=True)
class _Seat:
    """One decode worker with the best that can be done there. `pairs`: totals with each peer, infinite where it is broken; none
    where it is `alone`, since there is no peer for it."""

    layout: "_Layout"
    decode: _Worker
    own: Terms
    bound: bool
    paired: list[Terms]
    pairs: list[float]
    best: int
    remote: float
    alone: bool
    total: float
    local: tuple[Terms, float] | None = None  # its terms and the longest suffix, where that was looked at
    is_local: bool = False

    @property
    def name(self) -> str:
        decode = self.decode.facts.record.id
        return decode if self.is_local else f"{self.layout.peers[self.best].facts.record.id}→{decode}"

    def reason(self) -> Reason:
        if self.decode.facts.record.role is BOTH:
            return Reason.ROLE_BOTH
        if self.alone:
            return Reason.NO_PREFILL_WORKER
        if self.is_local:
            return Reason.SHORT_SUFFIX
        short = self.layout.tokens - self.decode.usable <= self.layout.policy.local_max_tokens
        return Reason.DECODE_BOUND if short and self.bound else Reason.LONG_SUFFIX

    def choice(self, others: Mapping[str, float], dropped: Mapping[str, str]) -> Choice:
        layout, decode = self.layout, self.decode.facts
        order: list[int] = []
        if not self.alone:
            healthy = [p for p, total in enumerate(self.pairs) if total < math.inf]
            order = sorted(healthy, key=lambda p: (p != self.best, self.pairs[p]))[:MAX_CANDIDATES]
        peers = [layout.peers[p] for p in order]
        whoever = self.decode if self.is_local else peers[0]
        terms, limit = self.local or layout.locally(self)
        if not self.is_local:
            terms = layout.peers[self.best].terms | self.paired[self.best] | self.own
        terms["total"] = self.total
        return Choice(  # by place: names of so many arguments cost as much as the object
            LOCAL if self.is_local else REMOTE,
            decode.record,
            tuple([Candidate(p.facts.record, int(p.usable)) for p in peers]),
            self.reason(),
            decode.attention_tokens,
            self.decode.held,
            layout.tokens - whoever.held,
            layout.request.max_tokens,
            whoever.facts.attention_tokens,
            int(limit),
            terms,
            others,
            dropped,
        )


class _Layout:
    """Workers of one layout. `peers`: prefill workers, the best by themselves first."""

    def __init__(
        self,
        decoders: Sequence[WorkerFacts],
        kept: Sequence[WorkerFacts],
        fingerprint: str,
        snapshot: Snapshot,
        request: RouteRequest,
        policy: Policy,
        random: _Ties,
    ) -> None:
        self.request, self.policy, self.tokens = request, policy, request.prompt_tokens
        self._snapshot = snapshot
        self._decoders = [self._seen(w) for w in decoders]
        usual = snapshot.reply_tokens or DEFAULT_REPLY_TOKENS
        self._reply_tokens = usual if usual < request.max_tokens else request.max_tokens
        peers = [
            self._seen(w)
            for w in kept
            if w.record.role is PREFILL and w.record.fingerprint == fingerprint and self.tokens < limit_tokens(w.record)
        ]
        self.peers = self._ranked(peers, random) if peers else []

    def _seen(self, w: WorkerFacts) -> _Worker:
        held = w.usable_tokens(self.tokens)
        reach, usable = self.policy.sight(w.attention_tokens, held, self.tokens)  # type: ignore[arg-type]
        fleet = self._snapshot.fleet.get((w.record.fingerprint, w.record.role), NO_RATES)
        return _Worker(w, fleet, held, float(reach), float(usable))

    def _ranked(self, peers: list[_Worker], random: _Ties) -> list[_Worker]:
        policy = self.policy
        behind = sum(p.facts.waiting_prompts for p in peers) / len(peers)
        for p in peers:
            compute_ms = _prefill_ms(p, self.tokens - p.usable)
            waiting = min(behind, p.facts.waiting_prompts + SOON)
            p.terms = {
                "wait": _prefill_ms(p, p.facts.queued_prefill_tokens),
                "prefill": compute_ms,
                "behind": policy.behind * waiting * compute_ms,
            }
        costs = [sum(p.terms.values()) for p in peers]
        lowest = min(costs)
        first = random.random.choice([i for i, cost in enumerate(costs) if cost <= lowest])
        shuffled = random.random.sample(range(len(peers)), len(peers))
        rest = [i for i in sorted(shuffled, key=costs.__getitem__) if i != first]
        count = 4 * MAX_CANDIDATES if self._snapshot.broken else MAX_CANDIDATES
        return [peers[i] for i in (first, *rest[: count - 1])]

    def seats(self) -> list[_Seat]:
        seats = []
        computed = [sum(p.terms.values()) for p in self.peers]
        for d in self._decoders:
            own, bound = self._decode_terms(d)
            paired: list[Terms] = []
            pairs: list[float] = []
            best, remote = 0, math.inf
            if computed and d.facts.record.role is not BOTH:
                paired, pairs = self._paired(d, computed, sum(own.values()))
                best = min(range(len(pairs)), key=pairs.__getitem__)
                remote = pairs[best]
            seat = _Seat(self, d, own, bound, paired, pairs, best, remote, remote == math.inf, remote)
            suffix_tokens = self.tokens - d.usable
            if seat.alone or suffix_tokens <= self.policy.local_max_tokens:
                terms, limit = seat.local = self.locally(seat)
                if suffix_tokens <= limit:
                    seat.is_local, seat.total = True, sum(terms.values())
            seats.append(seat)
        return seats

    def _paired(self, d: _Worker, computed: list[float], own_ms: float) -> tuple[list[Terms], list[float]]:
        """What lies between it and each peer, and the totals."""
        paired, broken = [self._pair(d, p) for p in self.peers], self._snapshot.broken
        pairs = [c + sum(p.values()) + own_ms for c, p in zip(computed, paired, strict=True)]
        if broken:
            ids = [(p.facts.record.id, d.facts.record.id) for p in self.peers]
            pairs = [math.inf if ids[i] in broken else total for i, total in enumerate(pairs)]
        return paired, pairs

    # ---- terms: see `cost` ----

    def locally(self, seat: _Seat) -> tuple[Terms, float]:
        """If the decode worker computes the prompt, and the longest suffix that it shall."""
        d, policy, active = seat.decode, self.policy, seat.decode.facts.active_requests
        suffix_tokens = self.tokens - d.usable
        compute_ms = _prefill_ms(d, suffix_tokens)
        stopped_ms = policy.others * active * compute_ms
        wait_ms = _prefill_ms(d, d.facts.queued_prefill_tokens)
        terms = {"wait": wait_ms, "prefill": compute_ms, **seat.own}
        terms["streams"] += stopped_ms
        if seat.alone:
            return terms, float(self.tokens)
        if seat.bound:
            return terms, 0.0
        growing = compute_ms * (1 + policy.others * active)
        spare = seat.remote - (sum(terms.values()) - growing)
        even = float(math.trunc(uncounted(counted(suffix_tokens) * spare / growing)))
        return terms, min(max(even, 0.0), policy.local_max_tokens)

    def _decode_terms(self, d: _Worker) -> tuple[Terms, bool]:
        active, slots, policy = d.facts.active_requests, d.facts.record.load.total_slots, self.policy
        without_it, with_it = _steps_ms(d, active)
        slower_ms = with_it - without_it if with_it > without_it else 0.0
        over = active + 1 - slots if slots > 0 else 0
        wait_ms = over / max(slots, 1.0) * self._reply_tokens * with_it if over > 0 else 0.0
        own_ms = self._reply_tokens * slower_ms * (active + 1)
        bound = 0 < slots <= active or with_it >= policy.decode_bound_ms
        return {"slot": wait_ms, "step": with_it, "streams": policy.others * own_ms}, bound

    def _pair(self, d: _Worker, p: _Worker) -> Terms:
        links, reads, peer = d.facts.rates.links, d.facts.rates.reads, p.facts.record.id
        own = None
        if sum(reads.values()) >= OBSERVATIONS:
            own = links[peer] if reads.get(peer, 0) >= OBSERVATIONS else d.facts.rates.link
        like = self._decoders[0]
        rate = _unless_noise(own, like.fleet.link) or LINK_BYTES_PER_S
        tokens, record = max(0.0, self.tokens - d.reach), like.facts.record
        per_token = record.block_bytes / record.block_tokens if record.block_bytes else BLOCK_BYTES_PER_TOKEN
        blocks_ms = 1e3 * (tokens * per_token) / rate
        moves_ms = blocks_ms + 1e3 * (record.slot_bytes or SLOT_BYTES) / rate
        into, out, wait_ms, prefill_ms = d.facts, p.facts, p.terms["wait"], p.terms["prefill"]
        busy_ms = 1e3 * (into.moving_bytes if into.moving_bytes > out.moving_bytes else out.moving_bytes) / rate
        link_ms = busy_ms - wait_ms if busy_ms > wait_ms else 0.0
        hidden_ms = link_ms + blocks_ms if link_ms + blocks_ms < prefill_ms else prefill_ms
        left_ms = link_ms + moves_ms - hidden_ms
        sharing = self.policy.sharing * ((into.reads if into.reads > out.reads else out.reads) + SOON)
        return {
            "link": link_ms,
            "transfer": moves_ms,
            "hidden": -hidden_ms,
            "second": (self.policy.second - 1) * left_ms,
            "sharing": sharing * moves_ms,
        }


def _prefill_ms(w: _Worker, tokens: float) -> float:
    if tokens <= 0:
        return 0.0
    tokens = counted(tokens)
    rate = _unless_noise(w.facts.rates.prefill.at(tokens, OBSERVATIONS), w.fleet.prefill.at(tokens))
    return 1e3 * tokens / (PREFILL_TOKENS_PER_S if rate is None else rate)


def _steps_ms(w: _Worker, sequences: int) -> tuple[float, float]:
    """With so many, and with one more."""
    own, like = w.facts.rates.step, w.fleet.step
    fast, slow = _twice(like, sequences) if like.n else (None, None)
    if own.n > OBSERVATIONS:
        own_fast, own_slow = _twice(own, sequences)
        fast, slow = _unless_noise(own_fast, fast), _unless_noise(own_slow, slow)
    if fast is None or slow is None:  # both or none
        fast, slow = STEP_S + STEP_SLOPE_S * sequences, STEP_S + STEP_SLOPE_S * (sequences + 1)
    return 1e3 * fast, 1e3 * slow


def _twice(line: Line, x: float) -> tuple[float, float]:
    """At `x` and one further."""
    slope, least = line.slope, line.y / 2
    at, further = line.y + slope * (x - line.x), line.y + slope * (x + 1 - line.x)
    return at if at > least else least, further if further > least else least


def _unless_noise(own: float | None, fleet: float | None) -> float | None:
    if own is None or (fleet is not None and 1 / NOISE < own / fleet < NOISE):
        return fleet
    return own
