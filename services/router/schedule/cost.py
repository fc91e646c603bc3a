"""What a choice costs, in milliseconds: the time to the first token, and what others lose by it.

    remote(P, D)   wait       tokens queued at P / its rate
                   prefill    (N − usable_P) / P's rate for that length
                   transfer   what D's attention does not reach yet, and one slot, over the link from P
                   hidden     − what of it moves while P still computes
                   slot       waiting for a slot of D, if all are taken
                   step       one step of D with one sequence more
                   streams    what D's streams lose by that sequence, for the length of a reply
                   behind     others will wait for this one: as many as wait at P, at most the average of all; at an idle
                              worker a few may still come
    local(D)       wait, prefill (N − usable_D), slot, step and streams at D; its streams also stand still while it prefills

The two sides save different things: a prefill worker what `usable_tokens` spares it, a decode worker the transfer of what its
attention already reaches; the final state moves whatever it holds.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.router.schedule.base import F64, Crowd, Scene, Terms
from services.router.schedule.rates import Rates

# Used until anything was measured, by anybody. Of the right order on a GPU; what matters is that they are equal for all.
PREFILL_TOKENS_PER_S = 20_000.0
STEP_S = 0.010
STEP_SLOPE_S = 0.0001  # per sequence
LINK_BYTES_PER_S = 10e9
BLOCK_BYTES_PER_TOKEN = 32_768
SLOT_BYTES = 50 << 20

SOON = 0.25  # prompts that will wait behind one at an idle worker
NOISE = 1.5  # a factor between a worker's rate and that of all like it


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
        blocks_ms, slot_ms = transfer_ms(decode, prefill, scene)
        hidden = np.minimum(blocks_ms, computed["prefill"]) if len(prefill) else blocks_ms
        return {"transfer": blocks_ms + slot_ms, "hidden": -hidden}

    def local(self, decode: Crowd, scene: Scene) -> Terms:
        compute_ms = prefill_ms(decode, scene.request.prompt_tokens - decode.usable, scene)
        terms = decode_terms(decode, scene)
        terms["streams"] = terms["streams"] + scene.policy.others * decode.active * compute_ms
        return {"wait": prefill_ms(decode, decode.queued, scene), "prefill": compute_ms, **terms}

    def local_limit(self, decode: Crowd, local: Terms, remote: F64, scene: Scene) -> F64:
        """Where both cost the same, if the time to compute the suffix is proportional to its length; none at all on a decode
        worker that is busy enough with decoding."""
        suffix_tokens = scene.request.prompt_tokens - decode.usable
        growing = local["prefill"] * (1 + scene.policy.others * decode.active)
        spare = remote - (sum(local.values()) - growing)
        even = np.clip(np.trunc(suffix_tokens * spare / growing), 0, scene.policy.local_max_tokens)
        return np.where(decode_bound(decode, scene), 0.0, even)


def prefill_ms(workers: Crowd, tokens: F64, scene: Scene) -> F64:
    """To compute so many tokens of prompts on each worker."""
    tokens = np.maximum(tokens, 0.0)
    rate = trusted(workers, tokens, lambda rates, n: rates.prefill.at(n) if n else None, scene)
    taken: F64 = 1e3 * tokens / np.where(np.isnan(rate), PREFILL_TOKENS_PER_S, rate)
    return taken


def step_ms(workers: Crowd, sequences: F64, scene: Scene) -> F64:
    """Of a decode step with so many sequences."""
    learnt = trusted(workers, sequences, lambda rates, n: rates.step.at(n), scene)
    return 1e3 * np.where(np.isnan(learnt), STEP_S + STEP_SLOPE_S * sequences, learnt)


def transfer_ms(decode: Crowd, prefill: Crowd, scene: Scene) -> tuple[F64, F64]:
    """(decode, prefill) of the blocks that the decode worker lacks, and of a slot."""
    shape = (len(decode), len(prefill))
    ids = [p.record.id for p in prefill.facts]
    own, fleet = np.full(shape, np.nan), np.full((shape[0], 1), np.nan)
    sizes = np.zeros((2, shape[0], 1))
    for i, w in enumerate(decode.facts):
        record, links = w.record, w.rates.links
        if links:
            mean = w.rates.link
            own[i] = [links.get(id) or mean for id in ids]
        fleet[i] = scene.fleet_of(w).link or np.nan
        sizes[0, i] = record.block_bytes / record.block_tokens if record.block_bytes else BLOCK_BYTES_PER_TOKEN
        sizes[1, i] = record.slot_bytes or SLOT_BYTES
    rate = unless_noise(own, fleet)
    rate = np.where(np.isnan(rate), LINK_BYTES_PER_S, rate)
    tokens = np.maximum(0.0, scene.request.prompt_tokens - decode.reach)[:, None]
    return 1e3 * tokens * sizes[0] / rate, 1e3 * sizes[1] / rate


def trusted(workers: Crowd, xs: F64, read: Callable[[Rates, float], float | None], scene: Scene) -> F64:
    """What is known of each worker at its x, or of all like it; nan where nothing is."""
    fleets: dict[tuple[int, float], float | None] = {}
    own, fleet = np.full(len(workers), np.nan), np.full(len(workers), np.nan)
    for i, (w, x) in enumerate(zip(workers.facts, xs.tolist(), strict=True)):
        found = read(w.rates, x)
        if found is not None:
            own[i] = found
        like = scene.fleet_of(w)
        key = (id(like), x)
        if key not in fleets:
            fleets[key] = read(like, x)
        if (of_all := fleets[key]) is not None:
            fleet[i] = of_all
    return unless_noise(own, fleet)


def unless_noise(own: F64, fleet: F64) -> F64:
    """What is known of a worker counts where it differs from all like it by more than half; less is noise, and choosing by
    noise only piles requests upon whoever seems to be fast. nan = unknown."""
    ratio = own / fleet
    near = (ratio > 1 / NOISE) & (ratio < NOISE)
    return np.where(np.isnan(own) | near, fleet, own)


def decode_terms(workers: Crowd, scene: Scene) -> Terms:
    """What one sequence more means on each decode worker, for itself and for those that run there."""
    active, slots = workers.active, workers.slots
    with_it = step_ms(workers, active + 1, scene)
    slower_ms = np.maximum(0.0, with_it - step_ms(workers, active, scene))
    over = np.where(slots > 0, active + 1 - slots, 0.0)
    wait_ms = np.where(over > 0, over / np.maximum(slots, 1.0) * scene.reply_tokens * with_it, 0.0)
    own_ms = scene.reply_tokens * slower_ms * (active + 1)
    return {"slot": wait_ms, "step": with_it, "streams": scene.policy.others * own_ms}


def decode_bound(workers: Crowd, scene: Scene) -> NDArray[np.bool_]:
    """No slot is left, or its steps already take as long as they may."""
    full = (workers.slots > 0) & (workers.slots <= workers.active)
    bound: NDArray[np.bool_] = full | (step_ms(workers, workers.active + 1, scene) >= scene.policy.decode_bound_ms)
    return bound
