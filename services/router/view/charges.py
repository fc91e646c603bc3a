"""What this router has given to one worker and not got back yet, beside what the worker says of itself.

What this router knows by itself (all charges, less what the worker says it has computed since) is exact as long as nobody else
uses the worker. That is told by the number of requests there. With other routers the worker's own account counts: it is as old as
its report, so what was charged after it is added. So nothing counts twice, a burst spreads before any report arrives, and several
routers see each other's work one report late.
"""

from dataclasses import dataclass, field

from twinflow.contracts.workers import Load


@dataclass(slots=True)
class _Prompt:
    tokens: int  # to compute, as predicted
    left: int
    done: bool = False  # its first token is here, the worker's report of its last part may not be


@dataclass(slots=True)
class Charges:
    """Of one worker incarnation. `new_…`: charged after the last report."""

    requests: set[str] = field(default_factory=set)
    new_requests: set[str] = field(default_factory=set)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)  # in order of arrival
    _left: int = 0
    _new: dict[str, int] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)  # prompts that are not done
    _elsewhere: int = 0  # of those, the ones whose requests run elsewhere

    # ---- what happens ----

    def prefill(self, request_id: str, tokens: int) -> None:
        if request_id in self._prompts:
            self.prefilled(request_id)
            del self._prompts[request_id]
        self._prompts[request_id] = _Prompt(tokens, tokens)
        self._new[request_id] = tokens
        self._left += tokens
        self._waiting.add(request_id)
        self._elsewhere += request_id not in self.requests

    def prefilled(self, request_id: str) -> None:
        """Nothing is left to compute for it. Unknown ids are ignored."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and not prompt.done:
            self._left -= prompt.left
            prompt.done = True
            self._new.pop(request_id, None)
            self._waiting.discard(request_id)
            self._elsewhere -= request_id not in self.requests

    def run(self, request_id: str) -> None:
        self._elsewhere -= request_id in self._waiting and request_id not in self.requests
        self.requests.add(request_id)
        self.new_requests.add(request_id)

    def ended(self, request_id: str) -> None:
        self.prefilled(request_id)
        self.requests.discard(request_id)
        self.new_requests.discard(request_id)

    def reported(self, computed_tokens: int) -> None:
        """A load has arrived, `computed_tokens` of prompts after the one before it: workers go in order."""
        self._new.clear()
        self.new_requests.clear()
        for prompt in self._prompts.values():
            if computed_tokens <= 0:
                break
            done = min(prompt.left, computed_tokens)
            prompt.left -= done
            self._left -= 0 if prompt.done else done
            computed_tokens -= done
        if len(self._prompts) > len(self._waiting):
            self._prompts = {id: prompt for id, prompt in self._prompts.items() if not prompt.done}

    # ---- what it amounts to ----

    def active_requests(self, load: Load) -> int:
        ours, told = len(self.requests), load.running + load.waiting + len(self.new_requests)
        return ours if ours > told else told

    def queued_prefill_tokens(self, load: Load) -> int:
        if load.running + load.waiting <= len(self.requests) + self._elsewhere:  # all of them are ours
            return self._left
        return max(self._left, load.queued_prefill_tokens + sum(self._new.values()))

    @property
    def waiting_prompts(self) -> int:
        """Prompts of this router that are not computed yet."""
        return len(self._waiting)

    def computing_tokens(self, computed_tokens: int) -> int:
        """Length of the prompt that these tokens, computed since the last report, were of. 0 = none of ours, or several."""
        for prompt in self._prompts.values():
            if prompt.left:
                return prompt.tokens if computed_tokens <= prompt.left else 0
        return 0
