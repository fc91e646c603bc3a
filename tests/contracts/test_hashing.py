import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinflow.contracts.hashing import (
    HASH_BYTES,
    TokenChain,
    block_hash,
    chain_hashes,
    pack_tokens,
    root_hash,
    tail_hash,
    unpack_tokens,
)

BT = 4
ROOT = root_hash("f")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def chain(tokens, root=ROOT):
    return TokenChain(root, BT, pack_tokens(tokens))


@given(TOKENS)
def test_tokens_pack_as_little_endian_uint32(tokens):
    packed = pack_tokens(tokens)
    assert packed == b"".join(t.to_bytes(4, "little") for t in tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize("bad", [-1, 2**32], ids=["negative", "too large"])
def test_what_is_no_token_id_is_refused(bad):
    with pytest.raises(OverflowError):
        pack_tokens([bad])


def test_half_a_token_is_refused():
    with pytest.raises(ValueError, match="multiple of"):
        TokenChain(ROOT, BT, b"123")
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"123")


@given(TOKENS)
def test_full_blocks_chain_from_the_root(tokens):
    hashes, parent = [], ROOT
    for at in range(0, len(tokens) - BT + 1, BT):
        parent = block_hash(parent, pack_tokens(tokens[at : at + BT]))
        hashes.append(parent)
    assert list(chain(tokens).block_hashes) == hashes == chain_hashes(ROOT, pack_tokens(tokens), BT)


@given(TOKENS, st.data())
def test_the_prefix_hash_depends_on_the_prefix_alone(tokens, data):
    position = data.draw(st.integers(0, len(tokens)))
    blocks = position // BT
    parent = chain(tokens).parent(blocks)
    tail = pack_tokens(tokens[blocks * BT : position])
    found = chain(tokens).prefix_hash(position)
    assert found == (tail_hash(parent, tail) if tail else parent)
    assert found == chain(tokens[:position]).prefix_hash(position)
    assert len(found) == HASH_BYTES


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_different_prefixes_have_different_hashes(a, b):
    named_a = {chain(a).prefix_hash(p): a[:p] for p in range(len(a) + 1)}
    named_b = {chain(b).prefix_hash(p): b[:p] for p in range(len(b) + 1)}
    assert len(named_a) == len(a) + 1
    for shared in named_a.keys() & named_b.keys():
        assert named_a[shared] == named_b[shared]


@given(TOKENS, st.data())
def test_appending_equals_one_shot(tokens, data):
    grown, at = chain([]), 0
    while at < len(tokens):
        n = data.draw(st.integers(1, len(tokens) - at))
        grown.append(tokens[at : at + n])
        at += n
    whole = chain(tokens)
    assert list(grown.block_hashes) == list(whole.block_hashes)
    assert (len(grown), grown.packed(), grown.tokens()) == (len(whole), whole.packed(), tokens)
    assert all(grown.prefix_hash(p) == whole.prefix_hash(p) for p in range(len(tokens) + 1))


@given(TOKENS, TOKENS)
def test_pushing_one_by_one_equals_appending(tokens, more):
    pushed, appended = chain(tokens), chain(tokens)
    for token in more:
        pushed.push(token)
    appended.append(more)
    assert len(pushed) == pushed.length == len(tokens) + len(more)
    assert pushed.tokens() == appended.tokens() and list(pushed.block_hashes) == list(appended.block_hashes)


@pytest.mark.parametrize("bad", [-1, 2**32], ids=["negative", "too large"])
def test_what_is_no_token_id_is_not_pushed(bad):
    c = chain([1, 2, 3])
    with pytest.raises(OverflowError):
        c.push(bad)
    assert c.tokens() == [1, 2, 3] and c.length == 3


def test_a_tail_is_never_taken_for_a_block():
    ids = pack_tokens([1, 2, 3, 4])
    assert tail_hash(ROOT, ids) != block_hash(ROOT, ids)


@pytest.mark.parametrize("position", [-1, 6])
def test_positions_outside_the_chain_are_refused(position):
    with pytest.raises(ValueError, match="outside the 5 tokens"):
        chain([1, 2, 3, 4, 5]).prefix_hash(position)


PART = st.text("ab\0", max_size=3)
PARTS = st.tuples(PART, PART, PART, PART)


@given(PARTS, PARTS)
def test_roots_are_separate_wherever_the_parts_are_split(a, b):
    assert (root_hash(*a) == root_hash(*b)) == (a == b)


@pytest.mark.parametrize(
    "other",
    [("g",), ("f", "tenant"), ("f", "", "salt"), ("f", "", "", "adapter")],
    ids=["model", "tenant", "salt", "adapter"],
)
def test_each_part_of_the_root_separates(other):
    tokens = [1, 2, 3, 4, 5]
    mine, theirs = chain(tokens), chain(tokens, root_hash(*other))
    assert all(mine.prefix_hash(p) != theirs.prefix_hash(p) for p in range(6))


def test_hashes_are_what_they_were():
    """They cross the wire between releases and name units on disk: a change here is a new layout version."""
    assert root_hash("f", "t", "s", "a").hex() == "e9aa5234d3a28a12dbdb04f863d96063"
    assert chain([1, 2, 3, 4, 5]).prefix_hash(4).hex() == "3289637e5b9df2ef9b79de5d796aedb3"
    assert chain([1, 2, 3, 4, 5]).prefix_hash(5).hex() == "b6f104fe6b7be5ee9be1ee55ad1655bd"
