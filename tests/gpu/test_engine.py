"""The engine on a GPU: captured graphs, two steps in flight, sampling on the device; the same tokens as on CPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.engine import TINY, Driver
from tests.models.tiny import Runner
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.contracts.requests import Grammar, GrammarKind
from twinflow.models.loader import load_model

pytestmark = pytest.mark.gpu

NEW = 40
TEXTS = [
    "Once upon a time there was a small boat",
    "The capital of",
    "Water",
    "Why is the sky blue? Because",
    "A B C D E F",
]


def tie_free(model, prompt: list[int], reply: list[int]) -> bool:
    """Whether no choice in the reply hung on less than 1e-4 between the two best logits."""
    runner = Runner(model, sequences=1, tokens=2048)
    seq = runner.add()
    logits = runner.step({seq: [*prompt, *reply[:-1]]})[seq][len(prompt) - 1 :]
    best = logits.float().topk(2).values
    return bool(((best[:, 0] - best[:, 1]) > 1e-4).all())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode
    texts = [*TEXTS, *(" ".join(TEXTS) * n for n in (1, 3, 8))]
    return [encode(f"{i} {t}").ids for i, t in enumerate(texts)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return Driver(TINY, "cpu").run(prompts, NEW)


@pytest.fixture(scope="module", params=["graphs", "no graphs", "one step at a time"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Driver]:
    options = {
        "graphs": {},
        "no graphs": {"cuda_graphs": "off"},
        "one step at a time": {"steps_in_flight": 1},
    }
    driver = Driver(TINY, "cuda", **options[request.param])
    yield driver
    driver.check()


def test_tokens_equal_those_of_the_cpu(gpu: Driver, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Cold and warm, all together and one by one."""
    model = load_model(str(TINY), dtype="float32")
    close = [i for i, (p, r) in enumerate(zip(prompts, expected, strict=True)) if not tie_free(model, p, r)]
    assert len(close) <= 1, f"too many near-ties to compare: {close}"
    for made in (
        gpu.run(prompts, NEW),
        gpu.run(prompts, NEW),
        [gpu.run([p], NEW)[0] for p in prompts],
        (gpu.flush(), [gpu.run([p], NEW)[0] for p in prompts])[1],
    ):
        different = [i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if a != b and i not in close]
        assert not different


def test_neighbours_change_nothing(gpu: Driver, prompts: list[list[int]]) -> None:
    """Batch invariance: tokens at temperature 0 in fp32 are those of the sequence alone, bit for bit."""
    alone = []
    for p in prompts:
        gpu.flush()
        alone += gpu.run([p], NEW)
    gpu.flush()
    assert gpu.run(prompts, NEW) == alone


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
        {"repetition_penalty": 1.15},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": ((7, 2.0),)},
    ],
    ids=lambda o: "+".join(o),
)
def test_every_option_gives_the_same_however_it_is_batched(
    gpu: Driver, prompts: list[list[int]], options: dict
) -> None:
    together = gpu.run(prompts, NEW, **options)
    assert [gpu.run([p], NEW, **options)[0] for p in prompts] == together
    assert together == Driver(TINY, "cpu").run(prompts, NEW, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replies_in_a_grammar_and_beside_some(gpu: Driver, prompts: list[list[int]], temperature: float) -> None:
    """Masks arrive while a step runs, draws follow it: the same tokens as on CPU, and neighbours without a grammar keep
    theirs."""
    free = {"temperature": temperature}
    held = {**free, "grammar": Grammar(GrammarKind.REGEX, r"[A-Z][a-z]{2,8}( [a-z]{2,8}){6,40}\.")}
    cpu = Driver(TINY, "cpu")
    mixed = [held if i % 2 else free for i in range(len(prompts))]
    expected = [cpu.run([p], NEW, **options)[0] for p, options in zip(prompts, mixed, strict=True)]
    assert gpu.run_each(prompts, NEW, mixed) == expected
    assert [gpu.run([p], NEW, **options)[0] for p, options in zip(prompts, mixed, strict=True)] == expected


def test_steps_of_every_size_fit_their_graphs(prompts: list[list[int]]) -> None:
    """Prompts of many lengths and batches of every size up to `max_running`."""
    driver = Driver(TINY, "cuda", max_running=9, step_tokens=2048, chunk_tokens=2048)
    cpu = Driver(TINY, "cpu", max_running=9, step_tokens=2048, chunk_tokens=2048)
    long = [t for p in prompts for t in p] * 4
    lengths = (1, 2, 63, 64, 65, 127, 128, 129, 300, 511, 513, 1000, 1500)
    work = [[long[(7 * n + i) % len(long)] for i in range(n)] for n in lengths]
    model = load_model(str(TINY), dtype="float32")
    expected = cpu.run(work, 6)
    different = [n for n, a, b in zip(lengths, driver.run(work, 6), expected, strict=True) if a != b]
    close = [n for n, p, reply in zip(lengths, work, expected, strict=True) if not tie_free(model, p, reply)]
    assert set(different) <= set(close)
    assert len(close) <= 3, f"too many near-ties to compare: {close}"
    driver.check()


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": "off"}], ids=["graphs", "no graphs"])
def test_states_kept_amid_a_step_are_resumed_from(prompts: list[list[int]], options: dict) -> None:
    """Two prompts in one step, which leaves dozens of states behind; their continuations from each, as on CPU."""
    driver, cpu = (
        Driver(TINY, device, step_tokens=2048, chunk_tokens=2048, checkpoint_interval_tokens=128, **rest)
        for device, rest in (("cuda", {**options, "checkpoint_slots": 64}), ("cpu", {"prefix_cache": False}))
    )
    long = [t for p in prompts for t in p] * 4
    pair = [long[:1100], long[50:900]]
    driver.run(pair, 2)
    assert driver.engine.runner.work.steps == 2
    branches = [[*p[: at + 3], *long[at : at + 20]] for p in pair for at in range(128, len(p) - 65, 128)]
    model, close = load_model(str(TINY), dtype="float32"), 0
    for branch in branches:
        chain = TokenChain(root_hash(driver.ready.fingerprint), 64, pack_tokens(branch))
        assert driver.engine.cache.match(chain).usable_tokens == (len(branch) - 23) // 128 * 128
        (made,), (expected,) = driver.run([branch], 6), cpu.run([branch], 6)
        if made != expected:
            assert not tie_free(model, branch, expected)
            close += 1
    assert close <= 2, f"too many near-ties to compare: {close}"
    driver.check()


def test_a_step_never_waits_for_the_gpu(prompts: list[list[int]]) -> None:
    driver = Driver(TINY, "cuda")
    driver.run(prompts, 4)
    real = driver.engine.runner.launch

    def guarded(parts):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(parts)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    driver.engine.runner.launch = guarded  # type: ignore[method-assign]
    driver.flush()
    driver.run(prompts, 8)
    driver.run(prompts, 8, temperature=0.9, top_p=0.8, repetition_penalty=1.1, logprobs=3)
