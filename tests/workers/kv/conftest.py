"""A KV receiver over an empty cache, and a source that speaks the protocol by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.kv.kv_peers import HandSource, cache_of, hand_source, receiving
from workers.kv.cache import KvCache
from workers.kv.receiver import KvReceiver


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
