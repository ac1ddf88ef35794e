"""Garbage collections of the router's process: full ones look at new objects, and nothing is held for good."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing

import pytest

from ringserve.services.cluster.garbage import FrozenSurvivors


class Node:
    """Object that may be part of a cycle."""

    def __init__(self) -> None:
        self.other: object = None


def cycle() -> Node:
    node, other = Node(), Node()
    node.other, other.other = other, node
    return node


@pytest.fixture
def survivors() -> Iterator[FrozenSurvivors]:
    with closing(FrozenSurvivors(growth=1.0)) as survivors:
        yield survivors


def is_looked_at(node: object) -> bool:
    return any(each is node for each in gc.get_objects())


def test_what_survives_a_full_collection_is_left_alone_and_is_freed_without_a_cycle(survivors: FrozenSurvivors) -> None:
    node = Node()
    gc.collect(1)
    assert is_looked_at(node)
    gc.collect()
    assert not is_looked_at(node)
    reference = weakref.ref(node)
    del node
    assert reference() is None


def test_state_that_is_loaded_is_not_looked_at(survivors: FrozenSurvivors) -> None:
    with survivors.loading():
        assert not gc.isenabled()
        node = Node()
    assert gc.isenabled()
    assert not is_looked_at(node)


def test_frozen_cycles_are_collected_when_survivors_have_become_many(survivors: FrozenSurvivors) -> None:
    gc.collect()
    held, old, new = [Node() for _ in range(100)], cycle(), cycle()
    first, second = weakref.ref(old), weakref.ref(new)
    del new
    gc.collect()
    assert second() is None, "a new cycle is collected as ever"
    del old
    assert first() is not None
    gc.collect()
    assert (survivors.num_whole, first()) == (1, None)
    assert len(held) == 100


def test_the_collector_looks_at_all_objects_again_at_the_end() -> None:
    survivors, node = FrozenSurvivors(), Node()
    gc.collect()
    survivors.close()
    survivors.close()
    assert is_looked_at(node)
    gc.collect()
    assert is_looked_at(node)
