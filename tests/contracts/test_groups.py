import dataclasses

import pytest

import twinflow
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec

KV = (TensorSpec("k", (2, 8), "bfloat16"), TensorSpec("v", (2, 8), "bfloat16"))
STATES = (TensorSpec("temporal", (4, 8, 16), "float32"), TensorSpec("conv", (3, 48), "bfloat16", sharded_dim=1))


def layout(**changes):
    values = {
        "model_id": "model",
        "block_tokens": 64,
        "kv": KV,
        "states": STATES,
        "attention_layers": (3, 7),
        "state_layers": (0, 1, 2, 4, 5, 6),
        "layout_version": 1,
    } | changes
    return CacheLayout(
        values["model_id"],
        (
            GroupSpec(
                "attention", GroupKind.ATTENTION, values["attention_layers"], values["kv"], values["block_tokens"]
            ),
            GroupSpec("state", GroupKind.STATE, values["state_layers"], values["states"]),
        ),
        values["layout_version"],
    )


def test_sizes_are_natural():
    made = layout()
    assert made.block_bytes == 2 * 64 * (2 * 8 * 2 + 2 * 8 * 2)
    assert made.slot_bytes == 6 * (4 * 8 * 16 * 4 + 3 * 48 * 2)
    assert made.block_tokens == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": "other"},
        {"block_tokens": 32},
        {"kv": (dataclasses.replace(KV[0], dtype="float16"), KV[1])},
        {"kv": (dataclasses.replace(KV[0], shape=(4, 8)), KV[1])},
        {"kv": (dataclasses.replace(KV[0], shape=(2, 16)), KV[1])},
        {"states": (dataclasses.replace(STATES[0], dtype="bfloat16"), STATES[1])},
        {"states": (STATES[0], dataclasses.replace(STATES[1], shape=(4, 48)))},
        {"states": (STATES[0], dataclasses.replace(STATES[1], sharded_dim=0))},
        {"states": STATES[::-1]},
        {"attention_layers": (3,)},
        {"state_layers": (0, 1, 2, 4, 5, 7)},
        {"layout_version": 2},
    ],
    ids=[
        "model", "block tokens", "kv dtype", "kv heads", "head dim", "temporal dtype", "conv width", "sharded dim",
        "order of tensors", "attention layers", "state layers", "layout version",
    ],
)  # fmt: skip
def test_the_fingerprint_covers_what_decides_whether_bytes_fit(changes):
    ours, theirs = layout(), layout(**changes)
    assert ours.fingerprint() != theirs.fingerprint()
    assert ours.describe() != theirs.describe()


def test_the_fingerprint_does_not_depend_on_the_release(monkeypatch):
    before = layout().fingerprint()
    monkeypatch.setattr(twinflow, "__version__", "999.0", raising=False)
    assert layout().fingerprint() == before
    assert len(before) == 32
    assert "version" not in layout().describe().replace("layout_version", "")


@pytest.mark.parametrize(
    ("kind", "block_tokens"),
    [(GroupKind.ATTENTION, None), (GroupKind.STATE, 64)],
    ids=["no block size", "blocks of states"],
)
def test_block_tokens_belong_to_attention(kind, block_tokens):
    with pytest.raises(ValueError, match="does not fit kind"):
        GroupSpec("group", kind, (0,), KV, block_tokens)
