"""A KV receiver over an empty cache, a source that speaks the protocol by hand, and two ranks on a fake NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.receiver import KvReceiver
from tests.workers.kv.fake_nixl import FakeNetwork, Pair
from tests.workers.kv.kv_peers import HandSource, cache_of, hand_source, receiving


@pytest.fixture
def cache() -> KvCache:
    return cache_of()


@pytest.fixture
def receiver(cache: KvCache) -> Iterator[KvReceiver]:
    with receiving(cache) as receiver:
        yield receiver


@pytest.fixture
def source(receiver: KvReceiver) -> Iterator[HandSource]:
    with hand_source(receiver.endpoint) as source:
        yield source


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def pair(network: FakeNetwork) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, network)
