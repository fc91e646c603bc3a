"""What a choice costs, in milliseconds: the time to the first token, and what others lose by it.

    remote(P, D)   wait       tokens queued at P / its rate
                   prefill    (N − usable_P) / P's rate for that length
                   link       until what is on its way over the link of either has passed, beyond the wait at P
                   transfer   what D's attention does not reach yet, and one slot, over the link from P
                   hidden     − what of these moves while P still computes
                   second     − most of what is left of these three: a first token waits for none of it
                   sharing    other reads over these links take longer by this one's; at an idle link a few may still come
                   slot       waiting for a slot of D, if all are taken
                   step       one step of D with one sequence more
                   streams    what D's streams lose by that sequence, for the length of a reply
                   behind     others will wait for this one: as many as wait at P, at most the average of all; at an idle
                              worker a few may still come
    local(D)       wait, prefill (N − usable_D), slot, step and streams at D; its streams also stand still while it prefills

The two sides save different things: a prefill worker what `usable_tokens` spares it, a decode worker the transfer of what its
attention already reaches; the final state moves whatever it holds.
"""

from collections.abc import Callable, Sequence

import numpy as np

from services.router.schedule.base import F64, Bools, Crowd, Scene, Terms
from services.router.schedule.rates import Line, counted, uncounted

# Used until anything was measured, by anybody. Of the right order on a GPU; what matters is that they are equal for all.
PREFILL_TOKENS_PER_S = 20_000.0
STEP_S = 0.010
STEP_SLOPE_S = 0.0001  # per sequence
LINK_BYTES_PER_S = 10e9
BLOCK_BYTES_PER_TOKEN = 32_768
SLOT_BYTES = 50 << 20

SOON = 0.25  # prompts that will wait behind one at an idle worker, reads that will share an idle link
NOISE = 1.5  # a factor between a worker's rate and that of all like it
OBSERVATIONS = 5  # before a rate of its own counts: a worker that seems slow by mistake would be asked no more


class Cost:
    """The scorer of `cost`, and of the policies that only read hits differently."""

    def prefill(self, workers: Crowd, scene: Scene) -> Terms:
        compute_ms = prefill_ms(workers, scene.request.prompt_tokens - workers.usable, scene)
        return {
            "wait": prefill_ms(workers, workers.queued, scene),
            "prefill": compute_ms,
            "behind": scene.policy.behind * np.minimum(scene.behind, workers.waiting + SOON) * compute_ms,
        }

    def decode(self, workers: Crowd, scene: Scene) -> Terms:
        return decode_terms(workers, scene)

    def pair(self, decode: Crowd, prefill: Crowd, computed: Terms, scene: Scene) -> Terms:
        if not len(prefill):
            return {}
        policy, rate = scene.policy, link_rates(decode, prefill, scene)
        block_bytes, slot_bytes = missing_bytes(decode, scene)
        blocks_ms = 1e3 * block_bytes[:, None] / rate
        moves_ms = blocks_ms + 1e3 * slot_bytes / rate
        moving = np.maximum(decode.moving[:, None], prefill.moving)
        link_ms = np.maximum(0.0, 1e3 * moving / rate - computed["wait"])
        hidden_ms = np.minimum(link_ms + blocks_ms, computed["prefill"])
        left_ms = link_ms + moves_ms - hidden_ms
        reads = np.maximum(decode.reads[:, None], prefill.reads) + SOON
        return {
            "link": link_ms,
            "transfer": moves_ms,
            "hidden": -hidden_ms,
            "second": (policy.second - 1) * left_ms,
            "sharing": policy.sharing * reads * moves_ms,
        }

    def local(self, decode: Crowd, own: Terms, scene: Scene) -> Terms:
        compute_ms = prefill_ms(decode, scene.request.prompt_tokens - decode.usable, scene)
        stopped_ms = scene.policy.others * decode.active * compute_ms
        wait_ms = prefill_ms(decode, decode.queued, scene)
        return {"wait": wait_ms, "prefill": compute_ms, **own, "streams": own["streams"] + stopped_ms}

    def local_limit(self, decode: Crowd, local: Terms, remote: F64, bound: Bools, scene: Scene) -> F64:
        """Where both cost the same, if the time to compute the suffix is proportional to its length; none at all on a decode
        worker that is busy enough with decoding."""
        suffix_tokens = _each(counted, scene.request.prompt_tokens - decode.usable)
        growing = local["prefill"] * (1 + scene.policy.others * decode.active)
        spare = remote - (sum(local.values()) - growing)
        even = np.trunc(_each(uncounted, suffix_tokens * spare / growing))
        return np.where(bound, 0.0, np.clip(even, 0, scene.policy.local_max_tokens))


def prefill_ms(workers: Crowd, tokens: F64, scene: Scene) -> F64:
    """To compute so many tokens of prompts on each worker."""
    tokens = np.where(tokens > 0, _each(counted, tokens), 0.0)
    own, like = _prefill_rates(workers, tokens, scene)
    rate = unless_noise(own, like)
    taken: F64 = 1e3 * tokens / np.where(np.isnan(rate), PREFILL_TOKENS_PER_S, rate)
    return taken


def _each(function: Callable[[float], float], values: F64) -> F64:
    return np.array([function(value) for value in values.tolist()], np.float64)


def step_ms(workers: Crowd, sequences: F64, scene: Scene) -> F64:
    """Of a decode step with so many sequences: (..., workers) both."""
    own = _lines([w.rates.step for w in workers.facts], sequences, OBSERVATIONS)
    learnt = unless_noise(own, _lines([like.step for like in scene.fleets(workers)], sequences))
    return 1e3 * np.where(np.isnan(learnt), STEP_S + STEP_SLOPE_S * sequences, learnt)


def _lines(lines: Sequence[Line], xs: F64, observations: float = 0.0) -> F64:
    """`Line.at` of all of them; nan where less was learnt."""
    if all(line is lines[0] for line in lines):  # those of all workers together
        lines = lines[:1]
    n, x, y, slope = np.array([(line.n, line.x, line.y, line.slope) for line in lines]).T
    return np.where(n > observations, np.maximum(y / 2, y + slope * (xs - x)), np.nan)


def missing_bytes(decode: Crowd, scene: Scene) -> tuple[F64, float]:
    """(decode,) of the blocks that each decode worker lacks, and of a slot."""
    record = decode.facts[0].record  # sizes are the same for all of a layout
    per_token = record.block_bytes / record.block_tokens if record.block_bytes else BLOCK_BYTES_PER_TOKEN
    return np.maximum(0.0, scene.request.prompt_tokens - decode.reach) * per_token, record.slot_bytes or SLOT_BYTES


def link_rates(decode: Crowd, prefill: Crowd, scene: Scene) -> F64:
    """(decode, prefill) bytes per second."""
    shape = (len(decode), len(prefill))
    ids = [p.record.id for p in prefill.facts]
    own = np.full(shape, np.nan)
    for i, w in enumerate(decode.facts):
        links, reads = w.rates.links, w.rates.reads
        if sum(reads.values()) >= OBSERVATIONS:
            mean = w.rates.link
            own[i] = [links[id] if reads.get(id, 0) >= OBSERVATIONS else mean for id in ids]
    fleet = np.full(shape, scene.fleets(decode)[0].link or np.nan)
    rate = unless_noise(own, fleet)
    return np.where(np.isnan(rate), LINK_BYTES_PER_S, rate)


def _prefill_rates(workers: Crowd, tokens: F64, scene: Scene) -> tuple[F64, F64]:
    """Tokens per second of each worker for so many tokens, and of all workers like it; nan where nothing is known."""
    known: dict[tuple[int, float], float | None] = {}
    own, like = [], []
    for w, fleet, n in zip(workers.facts, scene.fleets(workers), tokens.tolist(), strict=True):
        own.append(w.rates.prefill.at(n, OBSERVATIONS) if n else None)
        key = (id(fleet), n)
        if key not in known:
            known[key] = fleet.prefill.at(n) if n else None
        like.append(known[key])
    return np.array(own, np.float64), np.array(like, np.float64)


def unless_noise(own: F64, fleet: F64) -> F64:
    """What is known of a worker counts where it differs from all like it by more than half; less is noise, and choosing by
    noise only piles requests upon whoever seems to be fast. nan = unknown."""
    ratio = own / fleet
    near = (ratio > 1 / NOISE) & (ratio < NOISE)
    return np.where(np.isnan(own) | near, fleet, own)


def decode_terms(workers: Crowd, scene: Scene) -> Terms:
    """What one sequence more means on each decode worker, for itself and for those that run there."""
    active, slots = workers.active, workers.slots
    without_it, with_it = step_ms(workers, np.array([active, active + 1]), scene)
    slower_ms = np.maximum(0.0, with_it - without_it)
    over = np.where(slots > 0, active + 1 - slots, 0.0)
    wait_ms = np.where(over > 0, over / np.maximum(slots, 1.0) * scene.reply_tokens * with_it, 0.0)
    own_ms = scene.reply_tokens * slower_ms * (active + 1)
    return {"slot": wait_ms, "step": with_it, "streams": scene.policy.others * own_ms}


def decode_bound(workers: Crowd, own: Terms, scene: Scene) -> Bools:
    """No slot is left, or its steps already take as long as they may. `own`: terms that may tell how long they take."""
    full = (workers.slots > 0) & (workers.slots <= workers.active)
    with_it = own["step"] if "step" in own else step_ms(workers, workers.active + 1, scene)
    bound: Bools = full | (with_it >= scene.policy.decode_bound_ms)
    return bound
