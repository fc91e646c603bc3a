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

from services.router.schedule.base import Scene, Sighted, Terms, WorkerFacts

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

    def prefill(self, worker: Sighted, scene: Scene) -> Terms:
        compute_ms = prefill_ms(worker.facts, scene.request.prompt_tokens - worker.hit.usable_tokens, scene)
        return {
            "wait": prefill_ms(worker.facts, worker.facts.queued_prefill_tokens, scene),
            "prefill": compute_ms,
            "behind": scene.policy.behind * min(scene.behind, worker.facts.waiting_prompts + SOON) * compute_ms,
        }

    def decode(self, worker: Sighted, scene: Scene) -> Terms:
        return decode_terms(worker.facts, scene)

    def pair(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        blocks_ms, slot_ms = transfer_ms(decode, prefill.facts.record.id, scene)
        return {"transfer": blocks_ms + slot_ms, "hidden": -min(blocks_ms, computed["prefill"])}

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        compute_ms = prefill_ms(decode.facts, scene.request.prompt_tokens - decode.hit.usable_tokens, scene)
        terms = decode_terms(decode.facts, scene)
        terms["streams"] += scene.policy.others * decode.facts.active_requests * compute_ms
        return {
            "wait": prefill_ms(decode.facts, decode.facts.queued_prefill_tokens, scene),
            "prefill": compute_ms,
            **terms,
        }

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        """Where both cost the same, if the time to compute the suffix is proportional to its length; none at all on a decode
        worker that is busy enough with decoding."""
        if is_decode_bound(decode.facts, scene):
            return 0
        suffix_tokens = scene.request.prompt_tokens - decode.hit.usable_tokens
        growing = local["prefill"] * (1 + scene.policy.others * decode.facts.active_requests)
        spare = sum(remote.values()) - (sum(local.values()) - growing)
        return max(0, min(scene.policy.local_max_tokens, int(suffix_tokens * spare / growing)))


def prefill_ms(w: WorkerFacts, tokens: int, scene: Scene) -> float:
    """To compute so many tokens of prompts on this worker."""
    if tokens <= 0:
        return 0.0
    rate = trusted(w.rates.prefill.at(tokens), scene.fleet_of(w).prefill.at(tokens))
    return 1e3 * tokens / (rate or PREFILL_TOKENS_PER_S)


def step_ms(w: WorkerFacts, sequences: float, scene: Scene) -> float:
    """Of a decode step with so many sequences."""
    learnt = trusted(w.rates.step.at(sequences), scene.fleet_of(w).step.at(sequences))
    return 1e3 * (STEP_S + STEP_SLOPE_S * sequences if learnt is None else learnt)


def transfer_ms(decode: Sighted, prefill_id: str, scene: Scene) -> tuple[float, float]:
    """Of the blocks that the decode worker lacks, and of a slot."""
    record, rates = decode.facts.record, decode.facts.rates
    own = rates.links.get(prefill_id) or rates.link
    rate = trusted(own, scene.fleet_of(decode.facts).link) or LINK_BYTES_PER_S
    tokens = max(0, scene.request.prompt_tokens - decode.hit.reach_tokens)
    per_token = record.block_bytes / record.block_tokens if record.block_bytes else BLOCK_BYTES_PER_TOKEN
    return 1e3 * tokens * per_token / rate, 1e3 * (record.slot_bytes or SLOT_BYTES) / rate


def trusted(own: float | None, fleet: float | None) -> float | None:
    """What is known of a worker counts where it differs from all like it by more than half; less is noise, and choosing by
    noise only piles requests upon whoever seems to be fast."""
    if own is None or fleet is None:
        return fleet if own is None else own
    return own if not 1 / NOISE < own / fleet < NOISE else fleet


def decode_terms(w: WorkerFacts, scene: Scene) -> Terms:
    """What one sequence more means on this decode worker, for itself and for those that run there."""
    active, slots = w.active_requests, w.record.load.total_slots
    with_it = step_ms(w, active + 1, scene)
    slower_ms = max(0.0, with_it - step_ms(w, active, scene))
    over = active + 1 - slots if slots else 0
    wait_ms = over / slots * scene.reply_tokens * with_it if over > 0 else 0.0
    own_ms = scene.reply_tokens * slower_ms * (active + 1)
    return {"slot": wait_ms, "step": with_it, "streams": scene.policy.others * own_ms}


def is_decode_bound(w: WorkerFacts, scene: Scene) -> bool:
    """No slot is left, or its steps already take as long as they may."""
    slots = w.record.load.total_slots
    full = 0 < slots <= w.active_requests
    return full or step_ms(w, w.active_requests + 1, scene) >= scene.policy.decode_bound_ms
