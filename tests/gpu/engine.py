"""A whole engine on one device, driven turn by turn: what the tests of this folder compare."""

import queue
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import GenerateRequest, SamplingParams
from twinflow.contracts.workers import Role
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.engine.build import build_engine
from twinflow.engine.config import EngineConfig

TINY = Path(__file__).parents[2] / "models" / "twinflow-tiny"


class Driver:
    """`run` submits requests together and returns their tokens by id."""

    def __init__(self, model: Path, device: str, **config: Any) -> None:
        values: dict[str, Any] = {
            "role": Role.BOTH, "dtype": "float32", "cache_bytes": 512 << 20, "max_running": 16, **config,
        }  # fmt: skip
        settings = EngineConfig(
            model=str(model), worker_id="w", incarnation="1", device=device, transport="none", **values
        )
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # grammars that are ready
        self.engine, self.ready = build_engine(settings, self._inbox.put, None)

    def run(self, prompts: Iterable[list[int]], tokens: int, **sampling: Any) -> list[list[int]]:
        prompts = list(prompts)
        return self.run_each(prompts, tokens, [sampling] * len(prompts))

    def run_each(self, prompts: list[list[int]], tokens: int, sampling: list[dict[str, Any]]) -> list[list[int]]:
        """The same with options of its own for each."""
        usual = {"max_tokens": tokens, "seed": 1, "temperature": 0.0, "ignore_eos": True}
        root = root_hash(self.ready.fingerprint)
        requests = [
            GenerateRequest(f"r{i}", pack_tokens(p), SamplingParams(**{**usual, **options}), root)
            for i, (p, options) in enumerate(zip(prompts, sampling, strict=True))
        ]
        made: dict[str, list[int]] = {r.id: [] for r in requests}
        report = self.engine.turn([base.Submit(r, Mode.LOCAL) for r in requests])
        open_ = set(made)
        while True:
            for notice in report.notices if report else ():
                match notice:
                    case base.Continued(ids, token_ids):
                        for id, token in zip(ids, token_ids, strict=True):
                            made[id].append(token)
                    case base.Generated(id, samples):
                        made[id] += [s.token_id for s in samples]
                    case base.Done():
                        assert not notice.error_message, notice.error_message
                        open_.discard(notice.id)
            if not open_:
                return [made[r.id] for r in requests]
            inbound = []
            while not self._inbox.empty():
                inbound.append(self._inbox.get())
            report = self.engine.turn(inbound)

    def flush(self) -> None:
        self.engine.turn([base.Flush()])

    def check(self) -> None:
        """Quiet, and nothing is held."""
        while self.engine.busy:
            self.engine.turn([])
        self.engine.cache.check_integrity()
        assert all(c.held == c.doomed == 0 for c in self.engine.cache.counts().values())
