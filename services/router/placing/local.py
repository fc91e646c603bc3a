"""Placing where the view is: what every choice of this router goes through."""

import asyncio
import random
from collections.abc import Callable

from services.router.admission.base import Gate
from services.router.placing.base import Ended, TooLate, Want
from services.router.schedule.base import Choice, Policy, RouteRequest
from services.router.schedule.choose import choose
from services.router.schedule.explain import Decisions
from services.router.schedule.filters import usable_decoders
from services.router.schedule.limits import reply_tokens
from services.router.schedule.predict import first_token_s
from services.router.view.prompt import PromptKeys
from services.router.view.view import View

SENT_S = 0.001  # a request that was placed is on its way to its worker by then


class LocalPlacer:
    """`decisions` has the last ones, for who asks why."""

    def __init__(
        self, view: View, gate: Gate, model: str, policy: Policy, chosen: Callable[[Choice], None] = lambda _: None
    ) -> None:
        """`chosen` is told of every choice that was charged."""
        self.decisions = Decisions()
        self._view = view
        self._gate = gate
        self._model = model
        self._policy = policy
        self._chosen = chosen
        self._turn = 0

    async def place(self, want: Want) -> Choice | TooLate:
        self._turn += 1
        choice = self._choose(want)
        predicted_s = first_token_s(choice.terms)
        if want.slo_left_s is not None and predicted_s is not None and predicted_s > want.slo_left_s:
            return TooLate(predicted_s - want.slo_left_s)
        self._chosen(choice)
        self.decisions.add(want.id, want.prompt.tokens, choice)
        self._view.charge(want.id, choice, want.prompt)
        if self._view.is_behind:
            asyncio.get_running_loop().call_later(SENT_S, self._view.catch_up)
        if want.permit_id is not None:
            self._gate.placed(want.permit_id)
        return choice

    async def least_ttft_s(self, prompt: PromptKeys, max_tokens: int) -> float:
        route = RouteRequest(self._model, prompt.tokens, max_tokens, random.getrandbits(64))
        choice = choose(self._view.snapshot(prompt), route, self._policy)
        return first_token_s(choice.terms, waiting=False) or 0.0

    def begun(self, id: str) -> None:
        self._view.prefilled(id)

    def ended(self, end: Ended) -> None:
        self.decisions.ended(end.id, end.stats)
        self._view.finished(end.id)
        if end.ok and end.stats is not None:
            self._view.learn(end.choice, end.stats, end.reply_tokens)
        if end.reply is not None:
            self._view.replied(end.choice, end.reply)
        if end.broke:
            self._view.breakers.failed(("", end.choice.decode.id))

    def _choose(self, want: Want) -> Choice:
        snapshot, tokens = self._view.snapshot(want.prompt), want.prompt.tokens
        limit, excluded = want.max_tokens, want.excluded
        route = RouteRequest(self._model, tokens, limit or 1, random.getrandbits(64), self._turn, excluded)
        if limit is None:
            records = [w.record for w in usable_decoders(snapshot, route, self._policy)]
            limit = reply_tokens(records, tokens, want.default_tokens)
            route = RouteRequest(self._model, tokens, limit, route.tie_seed, self._turn, excluded)
        return choose(snapshot, route, self._policy)
