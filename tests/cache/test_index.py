"""The flat arrays below the tree, each against the plain Python that it stands for."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinflow.cache.base import BlockId
from twinflow.cache.heap import UnitHeap
from twinflow.cache.links import Links
from twinflow.cache.names import NameTable

SIZE = 40


def name_of(bucket: int, number: int) -> bytes:
    """The low bytes choose the bucket: few of them make long chains."""
    return bucket.to_bytes(8, "little") + number.to_bytes(8, "little")


@pytest.mark.parametrize("buckets", [1, 3, 1 << 30], ids=lambda n: f"{n} buckets")
def test_names_are_those_of_a_dict(buckets):
    rng = random.Random(0)
    table, model = NameTable(SIZE, BlockId), {}
    for _ in range(4000):
        name = name_of(rng.randrange(buckets), rng.randrange(60))
        if name in model:
            unit = model.pop(name)
            assert table.name(unit) == name
            table.remove(unit)
            with pytest.raises(KeyError):
                table.remove(unit)
        elif free := set(range(SIZE)) - set(model.values()):
            unit = rng.choice(sorted(free))
            table.add(name, BlockId(unit))
            model[name] = unit
        assert len(table) == len(model)
        assert table.find(name) == model.get(name)
        other = name_of(rng.randrange(buckets), rng.randrange(60))
        assert table.find(other) == model.get(other)


@pytest.mark.parametrize("buckets", [1, 3, 1 << 30], ids=lambda n: f"{n} buckets")
def test_many_names_at_once_are_as_if_one_by_one(buckets):
    rng = random.Random(0)
    at_once, one_by_one = NameTable(SIZE, BlockId), NameTable(SIZE, BlockId)
    for _ in range(200):
        numbers = rng.sample(range(60), SIZE)
        units = [BlockId(u) for u in rng.sample(range(SIZE), rng.randrange(1, SIZE))]
        names = [name_of(rng.randrange(buckets), number) for number in numbers[: len(units)]]
        at_once.add_each(names, units)
        for name, unit in zip(names, units, strict=True):
            one_by_one.add(name, unit)
        assert [at_once.find(n) for n in names] == [one_by_one.find(n) for n in names] == units
        gone = rng.sample(units, rng.randrange(1, len(units) + 1))
        assert at_once.remove_all(gone) == [names[units.index(u)] for u in gone]
        for unit in gone:
            one_by_one.remove(unit)
        assert [at_once.find(n) for n in names] == [one_by_one.find(n) for n in names]
        assert len(at_once) == len(one_by_one) == len(units) - len(gone)
        left = [u for u in units if u not in gone]
        at_once.remove_all(left)
        for unit in left:
            one_by_one.remove(unit)
    with pytest.raises(KeyError):
        at_once.remove_all([BlockId(1)])


def test_a_path_hangs_and_goes_as_if_block_by_block():
    """Beside siblings of its first block."""
    at_once, one_by_one = Links(SIZE, BlockId), Links(SIZE, BlockId)
    path = [BlockId(u) for u in (7, 3, 9, 1)]
    for links in (at_once, one_by_one):
        links.attach(BlockId(20), BlockId(30))
    at_once.attach_path(path, BlockId(30))
    for unit, parent in zip(path, (BlockId(30), *path), strict=False):
        one_by_one.attach(unit, parent)
    for links in (at_once, one_by_one):
        links.attach(BlockId(21), BlockId(30))
        assert links.path(path[-1]) == [30, *path]
        assert [links.only_parent(u) for u in path] == [None, *path[:-1]]
    assert facts(at_once) == facts(one_by_one)
    at_once.detach_path(path[::-1])
    for unit in reversed(path):
        one_by_one.detach(unit)
    assert facts(at_once) == facts(one_by_one)
    assert list(at_once.children(BlockId(30))) == [21, 20]


def facts(links):
    return links._parent, links._first, links._after, links._before


def test_links_are_those_of_a_dict_of_children():
    rng = random.Random(1)
    links, parents = Links(SIZE, BlockId), {}
    for _ in range(4000):
        children = defaultdict(set)
        for unit, parent in parents.items():
            children[parent].add(unit)
        free = [u for u in range(SIZE) if u not in parents]
        what = rng.random()
        if what < 0.5 and free:
            unit, parent = rng.choice(free), rng.choice([None, *parents])
            links.attach(BlockId(unit), parent)
            parents[unit] = parent
        elif what < 0.8 and (leaves := [u for u in parents if not children[u]]):
            unit = rng.choice(leaves)
            links.detach(BlockId(unit))
            del parents[unit]
        elif free and parents:
            source, target = rng.choice(sorted(parents)), rng.choice(free)
            links.replace(BlockId(source), BlockId(target))
            parents = {target if u == source else u: target if p == source else p for u, p in parents.items()}
        for unit, parent in parents.items():
            assert links.parent(unit) == parent
            below = {u for u, p in parents.items() if p == unit}
            assert set(links.children(unit)) == below and links.has_children(unit) == bool(below)
            path = [unit]
            while parents[path[0]] is not None:
                path.insert(0, parents[path[0]])
            assert links.path(unit) == path


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 5), st.integers(-3, 3)), max_size=200))
def test_the_heap_gives_the_smallest_key_whatever_was_changed_or_removed(changes):
    heap, model = UnitHeap[BlockId](SIZE), {}
    for unit, priority, rank in changes:
        if unit in model and rank == 3:
            heap.remove(BlockId(unit))
            del model[unit]
        else:
            heap.put(BlockId(unit), (float(priority), rank))
            model[unit] = (float(priority), rank)
        heap.check_order()
        assert set(heap) == set(model) and all(u in heap for u in model) and len(heap) == len(model)
        assert not model or heap.key(heap.at(0)) == min(model.values())
    while model:
        unit = heap.at(0)
        assert model[unit] == min(model.values())
        heap.remove(unit)
        del model[unit]
        heap.check_order()
