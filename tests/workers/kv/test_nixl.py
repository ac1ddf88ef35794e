"""NIXL itself on host memory: processes that are killed, sources that stand still, and peers that it does not reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from ringserve.cp_core.errors import TransferError, Unavailable
from ringserve.workers.kv import pulls
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.receiver import KvReceiver
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    NUM_LAYERS,
    SOURCE,
    TOKENS,
    TRUTH,
    Truth,
    cache_of,
    expect_of,
    is_untouched,
    key_of,
    receiving,
    send_of,
    sending,
    wait_for_slots,
)
from tests.workers.kv.nixl_peers import (
    EMULATED,
    StillNixl,
    hear,
    open_agent,
    process_of,
    run_destination,
    run_source,
    wait_until_sent,
)

NO_WAY = "PROTO_EMULATION_ENABLE=n,TLS=tcp,NET_DEVICES=lo"


def check_serves(receiver: KvReceiver, cache: KvCache, name: str, *, first: int = 0) -> None:
    """Check that another source with an agent of its own is served, into blocks that `first` names."""
    source, blocks = cache_of(), tuple(range(first, first + 3))
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with closing(open_agent(f"prefill-0/{name}")) as agent, sending(source, agent=agent) as sender:
        receiver.expect(expect_of(key_of(name), TOKENS, blocks))
        sender.send_all(send_of(key_of(name), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        receiver.wait_sealed(key_of(name), WAIT_SECONDS)
        assert sender.counts.nixl_bytes
        assert not sender.counts.socket_bytes
    assert torch.equal(cache.read(0, blocks, 0, TOKENS).v, TRUTH.v[0])


def test_a_source_process_that_is_killed_fails_the_wait_and_the_destination_serves_others() -> None:
    cache = cache_of()
    with (
        closing(open_agent(DESTINATION)) as agent,
        receiving(cache, agent=agent) as receiver,
        process_of(run_source) as (process, pipe),
    ):
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        pipe.send((receiver.endpoint, 1))
        assert hear(pipe) == "sent"
        process.kill()
        with pytest.raises(Unavailable, match="is gone"):
            receiver.wait_sealed(key_of(), WAIT_SECONDS)
        wait_for_slots(agent.landings, 8)
        check_serves(receiver, cache, "afterwards", first=36)


def test_a_destination_process_that_is_killed_fails_the_send_and_its_slots_come_back() -> None:
    source = cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with (
        closing(open_agent(SOURCE)) as agent,
        sending(source, agent=agent) as sender,
        process_of(run_destination) as (process, pipe),
    ):
        endpoint = hear(pipe)
        assert isinstance(endpoint, str)
        sender.begin(send_of(key_of(), endpoint, TOKENS, BLOCKS))
        sender.layer_ready(key_of(), 0)
        wait_until_sent(sender, 1)
        process.kill()
        with pytest.raises(Unavailable, match="is gone"):
            sender.finish(key_of(), WAIT_SECONDS)
        wait_for_slots(agent.out, 8)
        cache = cache_of()
        with closing(open_agent(DESTINATION)) as other, receiving(cache, agent=other) as receiver:
            receiver.expect(expect_of(key_of("again"), TOKENS, BLOCKS))
            sender.send_all(send_of(key_of("again"), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
            receiver.wait_sealed(key_of("again"), WAIT_SECONDS)
            TRUTH.check(cache, BLOCKS, range(TOKENS))


def test_closing_amid_a_read_of_a_process_that_stands_still_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "CLOSE_SECONDS", 0.1)
    before, cache = set(threading.enumerate()), cache_of()
    with (
        closing(open_agent(DESTINATION, EMULATED)) as agent,
        receiving(cache, agent=agent) as receiver,
        process_of(run_source, EMULATED) as (_, pipe),
    ):
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        pipe.send((receiver.endpoint, 1))
        assert hear(pipe) == "sent"
        wait_for_slots(agent.landings, 7)
        receiver.close()
        agent.close()
        with pytest.raises(Unavailable, match="the KV receiver is closed"):
            receiver.wait_sealed(key_of(), WAIT_SECONDS)
        assert is_untouched(cache)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PullAgent, PullAgent]]:
    """Agents (source, destination) over TCP with emulated RMA, which is allowed here alone."""
    monkeypatch.setattr(StillNixl, "is_still", False)
    monkeypatch.setattr(pulls, "IDLE_SECONDS", 0.005)  # over TCP every READ needs the source
    with (
        closing(open_agent(SOURCE, EMULATED, StillNixl)) as source,
        closing(open_agent(DESTINATION, EMULATED)) as destination,
    ):
        yield source, destination


@pytest.mark.parametrize("ends_by", ["drop", "stall"])
def test_what_a_source_serves_after_it_stood_still_changes_no_block(
    still: tuple[PullAgent, PullAgent], ends_by: str
) -> None:
    own, agent = still
    source, cache = cache_of(), cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with ExitStack() as stack:
        receiver = stack.enter_context(
            receiving(cache, agent=agent, stall_seconds=WAIT_SECONDS if ends_by == "drop" else 1.0)
        )
        sender = stack.enter_context(sending(source, agent=own))
        # The first transfer connects the agents; then the source serves nothing, and a READ stays under way.
        receiver.expect(expect_of(key_of("first"), TOKENS, (40, 41, 42)))
        sender.send_all(send_of(key_of("first"), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        receiver.expect(expect_of(key_of("still"), TOKENS, BLOCKS))
        StillNixl.is_still = True
        sender.begin(send_of(key_of("still"), receiver.endpoint, TOKENS, BLOCKS))
        sender.layer_ready(key_of("still"), 0)
        wait_for_slots(agent.landings, 7)
        if ends_by == "drop":
            receiver.drop(key_of("still"))
        else:
            with pytest.raises(Unavailable, match="is gone: timed out"):
                receiver.wait_sealed(key_of("still"), WAIT_SECONDS)
        other = Truth.random(TOKENS, seed=9)
        other.store(cache, BLOCKS, range(TOKENS))
        assert agent.landings.num_free == 7
        StillNixl.is_still = False
        wait_for_slots(agent.landings, 8)
        sender.layer_ready(key_of("still"), 1)
        sender.layer_ready(key_of("still"), 2)
        with pytest.raises((TransferError, Unavailable), match=r"dropped by its destination|is gone"):
            sender.finish(key_of("still"), WAIT_SECONDS)
        for layer in range(NUM_LAYERS):
            assert torch.equal(cache.read(layer, BLOCKS, 0, TOKENS).k, other.k[layer])
        receiver.expect(expect_of(key_of("next"), TOKENS, BLOCKS))
        sender.send_all(send_of(key_of("next"), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        receiver.wait_sealed(key_of("next"), WAIT_SECONDS)
        assert torch.equal(cache.read(0, BLOCKS, 0, TOKENS).k, TRUTH.k[0])


def test_a_peer_that_only_emulated_rma_would_reach_is_not_read() -> None:
    source, cache = cache_of(), cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with (
        closing(open_agent(SOURCE, NO_WAY)) as own,
        closing(open_agent(DESTINATION, NO_WAY)) as agent,
        receiving(cache, agent=agent) as receiver,
        sending(source, agent=own) as sender,
    ):
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        with pytest.raises(Unavailable, match=r"cannot read by NIXL, which kv_transfer\.carrier requires: NIXL says"):
            sender.send_all(send_of(key_of(), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        agent.check_usable()
    assert is_untouched(cache)
