"""Staging slots run out and come back, READs end in every way, and policies decide for sockets. NIXL is a fake."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import ConfigError, StaleIncarnation, TransferError, Unavailable
from ringserve.workers.kv import nixl_agent, pulls
from ringserve.workers.kv.frames import SlotRef
from ringserve.workers.kv.nixl_agent import Disconnected, ucx_settings
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.staging import SlotPool
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.fake_nixl import FakeNetwork, Pair
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    LAYER_BYTES,
    NUM_LAYERS,
    SLOT_BYTES,
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

# --- slots run out and come back -------------------------------------------------------------------------------------


def test_a_source_waits_for_a_slot_and_goes_on_when_one_is_read(pair: Pair, network: FakeNetwork) -> None:
    network.gate.clear()
    pair.begin("turn-1")
    # A destination has at most half of the slots: the third layer waits.
    wait_for_slots(pair.source_agent.out, 2)
    network.gate.set()
    pair.finish("turn-1")
    TRUTH.check(pair.cache, BLOCKS, range(TOKENS))
    wait_for_slots(pair.source_agent.out, 4)
    wait_for_slots(pair.agent.landings, 4)


def test_a_destination_that_reads_nothing_does_not_hold_up_another(network: FakeNetwork) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, network)
        network.gate.clear()
        pair.begin("stuck")
        wait_for_slots(pair.source_agent.out, 2)
        other = FakeNetwork()
        other.names = network.names
        agent = stack.enter_context(other.open_agent("decode-1/1"))
        cache = cache_of()
        receiver = stack.enter_context(receiving(cache, agent=agent))
        receiver.expect(expect_of(key_of("quick"), TOKENS, BLOCKS))
        pair.sender.send_all(send_of(key_of("quick"), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        receiver.wait_sealed(key_of("quick"), WAIT_SECONDS)
        TRUTH.check(cache, BLOCKS, range(TOKENS))
        network.gate.set()
        pair.finish("stuck")


def test_a_destination_that_never_reads_counts_as_gone_and_its_slots_come_back(network: FakeNetwork) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, network)
        source = stack.enter_context(sending(pair.source, agent=pair.source_agent, stall_seconds=0.2))
        network.gate.clear()
        pair.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        source.begin(send_of(key_of(), pair.receiver.endpoint, TOKENS, BLOCKS))
        source.layer_ready(key_of(), 0)
        with pytest.raises(Unavailable, match=r"it left a slot unread for 0.2 s"):
            source.finish(key_of(), WAIT_SECONDS)
        wait_for_slots(pair.source_agent.out, 4)
        network.gate.set()


def test_no_free_slot_in_time_is_one_clear_error() -> None:
    pool = SlotPool(3, max_held=2)
    first, second = pool.take("one", 0.0), pool.take("one", 0.0)
    assert (first, second) == (0, 1)
    with pytest.raises(Unavailable, match=r"no staging slot for KV: none of 3 is free after 0.01 s"):
        pool.take("one", 0.01)
    assert pool.take("other", 0.0) == 2
    pool.release(first)
    assert pool.take("one", 0.0) == first
    for slot in range(3):
        assert not pool.is_used_up
        pool.lose(slot)
    assert pool.is_used_up
    with pytest.raises(Unavailable, match="none of 0 is free"):
        pool.take("one", WAIT_SECONDS)
    pool.close()
    with pytest.raises(Unavailable, match="its connection has ended"):
        pool.take("one", WAIT_SECONDS)


def test_closing_a_sender_ends_its_wait_for_a_slot(network: FakeNetwork) -> None:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        pair = Pair(stack, network)
        network.gate.clear()
        pair.begin("turn-1")
        wait_for_slots(pair.source_agent.out, 2)
        pair.sender.close()
        wait_for_slots(pair.source_agent.out, 4)
        network.gate.set()
    assert set(threading.enumerate()) <= before


def test_a_slot_whose_writing_failed_is_odd_until_it_is_written(network: FakeNetwork) -> None:
    with network.open_agent(SOURCE) as agent:
        words = []
        for fails in (True, True, False):
            try:
                with agent.out.writing(0):
                    words.append(int(agent.out.words[0]))
                    assert not fails
            except AssertionError:
                continue
        assert words == [1, 3, 5]
        assert agent.out.ref(0, 9) == SlotRef(0, 6, 9)


# --- drops and ends of READs -----------------------------------------------------------------------------------------


def test_a_drop_returns_at_once_amid_a_read_and_what_lands_later_changes_no_block(
    pair: Pair, network: FakeNetwork
) -> None:
    network.gate.clear()
    pair.begin("dropped", layers=1)
    assert network.posted.wait(WAIT_SECONDS)
    pair.receiver.drop(key_of("dropped"))
    other = Truth.random(TOKENS, seed=9)
    other.store(pair.cache, BLOCKS, range(TOKENS))
    network.gate.set()
    pair.sender.layer_ready(key_of("dropped"), 1)
    pair.sender.layer_ready(key_of("dropped"), 2)
    with pytest.raises(TransferError, match=r"was dropped by its destination|not expected here"):
        pair.sender.finish(key_of("dropped"), WAIT_SECONDS)
    other.check(pair.cache, BLOCKS, range(TOKENS))
    pair.begin("next", blocks=(20, 21, 22))
    pair.finish("next")
    assert torch.equal(pair.cache.read(0, (20, 21, 22), 0, TOKENS).k, TRUTH.k[0])


def test_abandoning_waits_for_the_packing_alone_not_for_the_destination(pair: Pair, network: FakeNetwork) -> None:
    network.gate.clear()
    pair.begin("turn-1")
    assert network.posted.wait(WAIT_SECONDS)
    pair.sender.abandon(key_of("turn-1"))
    # The blocks are the next sequence's; what is read afterwards was packed before.
    for tensor in (*pair.source.k_layers, *pair.source.v_layers):
        tensor.fill_(torch.nan)
    network.gate.set()
    with pytest.raises(TransferError, match="it was abandoned"):
        pair.receiver.wait_sealed(key_of("turn-1"), WAIT_SECONDS)
    stored = pair.cache.read(0, BLOCKS, 0, TOKENS).k
    assert stored.isnan().all() or torch.equal(stored, TRUTH.k[0])


def test_a_read_that_takes_too_long_ends_its_connection_and_its_slot_comes_back_when_it_is_over(
    network: FakeNetwork,
) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, network, stall_seconds=0.2)
        network.gate.clear()
        pair.begin("turn-1", layers=1)
        with pytest.raises(Unavailable, match=r"is gone: timed out"):
            pair.receiver.wait_sealed(key_of("turn-1"), WAIT_SECONDS)
        assert pair.agent.landings.num_free == 3
        network.gate.set()
        wait_for_slots(pair.agent.landings, 4)
        assert is_untouched(pair.cache)
        with pytest.raises(Unavailable, match="is gone"):  # now the sender reconnects for turn-2
            pair.sender.finish(key_of("turn-1"), WAIT_SECONDS)
        # The peer's former life is forgotten, and the same agent is met again, which takes its time on a busy machine.
        pair.receiver._stall_seconds = WAIT_SECONDS
        pair.begin("turn-2")
        pair.finish("turn-2")
        TRUTH.check(pair.cache, BLOCKS, range(TOKENS))
        assert network.removed == [pair.source_agent.name]


def test_a_peer_that_is_gone_fails_its_transfers_and_its_landing_slots_are_safe(
    pair: Pair, network: FakeNetwork
) -> None:
    network.fail = lambda number: Disconnected("it is gone") if number == 2 else None
    pair.begin("turn-1")
    with pytest.raises(Unavailable, match="it is gone"):
        pair.receiver.wait_sealed(key_of("turn-1"), WAIT_SECONDS)
    with pytest.raises(Unavailable, match="is gone"):
        pair.sender.finish(key_of("turn-1"), WAIT_SECONDS)
    wait_for_slots(pair.agent.landings, 4)
    wait_for_slots(pair.source_agent.out, 4)
    pair.agent.check_usable()
    pair.begin("turn-2")
    pair.finish("turn-2")


def test_a_read_whose_end_is_unknown_costs_its_landing_slot_and_the_last_one_the_rank(
    pair: Pair, network: FakeNetwork
) -> None:
    network.fail = lambda number: OSError("it says nothing of its end")
    for lost in range(4):
        pair.agent.check_usable()
        with ExitStack() as stack:
            agent = stack.enter_context(network.open_agent(f"prefill-0/{lost}"))
            sender = stack.enter_context(sending(pair.source, agent=agent))
            name = f"turn-{lost}"
            pair.receiver.expect(expect_of(key_of(name), TOKENS, BLOCKS))
            sender.begin(send_of(key_of(name), pair.receiver.endpoint, TOKENS, BLOCKS))
            sender.layer_ready(key_of(name), 0)
            with pytest.raises(Unavailable, match="it says nothing of its end"):
                pair.receiver.wait_sealed(key_of(name), WAIT_SECONDS)
    with pytest.raises(Unavailable, match="has no safe landing slot left"):
        pair.agent.check_usable()


def test_closing_amid_a_read_ends_every_wait_and_leaves_no_thread(
    network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "CLOSE_SECONDS", 0.05)
    before = set(threading.enumerate())
    with ExitStack() as stack:
        pair = Pair(stack, network)
        network.gate.clear()
        pair.begin("turn-1", layers=1)
        assert network.posted.wait(WAIT_SECONDS)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(pair.receiver.wait_sealed, key_of("turn-1"), WAIT_SECONDS)
            pair.receiver.close()
            pair.agent.close()
            with pytest.raises(Unavailable, match="the KV receiver is closed"):
                waiting.result(WAIT_SECONDS)
    assert set(threading.enumerate()) <= before


# --- policies --------------------------------------------------------------------------------------------------------


def without_agent(network: FakeNetwork) -> PullAgent | None:
    return None


def with_small_slots(network: FakeNetwork) -> PullAgent | None:
    return network.agent(DESTINATION, slot_bytes=SLOT_BYTES // 2)


@pytest.mark.parametrize(
    ("make_agent", "reason"),
    [(without_agent, "the destination has no NIXL agent"), (with_small_slots, "its slots have 4096 bytes on cpu")],
)
@pytest.mark.parametrize("is_required", [False, True])
def test_a_destination_that_nixl_does_not_reach_gets_its_payloads_by_the_socket_unless_nixl_was_named(
    network: FakeNetwork,
    caplog: pytest.LogCaptureFixture,
    make_agent: Callable[[FakeNetwork], PullAgent | None],
    reason: str,
    is_required: bool,
) -> None:
    source, cache = cache_of(), cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with ExitStack() as stack:
        agent = make_agent(network)
        if agent is not None:
            stack.enter_context(closing(agent))
        own = stack.enter_context(closing(network.agent(SOURCE, is_required=is_required)))
        receiver = stack.enter_context(receiving(cache, agent=agent))
        sender = stack.enter_context(sending(source, agent=own))
        names = ("turn-1", "turn-2")
        for number, name in enumerate(names):
            receiver.expect(expect_of(key_of(name), TOKENS, tuple(block + number for block in BLOCKS)))
            send = send_of(key_of(name), receiver.endpoint, TOKENS, BLOCKS)
            if is_required:
                with pytest.raises(Unavailable, match=f"which kv_transfer.carrier requires: {reason}"):
                    sender.send_all(send, WAIT_SECONDS)
            else:
                sender.send_all(send, WAIT_SECONDS)
                receiver.wait_sealed(key_of(name), WAIT_SECONDS)
        assert sender.counts.fallbacks == (0 if is_required else 1)
        assert sender.counts.socket_bytes == (0 if is_required else 2 * NUM_LAYERS * LAYER_BYTES)
        assert caplog.text.count("falls back from NIXL to the socket") == (0 if is_required else 1)


def test_a_card_for_another_life_of_the_destination_ends_as_a_stale_transfer(pair: Pair) -> None:
    stale = dataclasses.replace(key_of(), destination="decode-0/0")
    with pytest.raises(StaleIncarnation, match="which is not here"):
        pair.sender.send_all(send_of(stale, pair.receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)


def test_agents_listen_on_loopback_alone_and_without_tcp_where_there_is_rdma(tmp_path: Path) -> None:
    forced = "PROTO_EMULATION_ENABLE=n,CUDA_IPC_ENABLE_GET_ZCOPY=on"
    assert ucx_settings(tmp_path / "none") == ucx_settings(tmp_path) == f"{forced},NET_DEVICES=lo"
    (tmp_path / "mlx5_0").mkdir()
    assert ucx_settings(tmp_path) == f"{forced},TLS=^tcp"


def test_nixl_that_is_not_installed_or_does_not_load_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(nixl_agent, "_packages", list)
    assert not nixl_agent.has_nixl()
    with pytest.raises(ConfigError, match=r"^kv_transfer.carrier: 'nixl' needs .*pip install 'ringserve\[nixl\]'$"):
        PullAgent(SOURCE, device, slot_bytes=SLOT_BYTES)

    monkeypatch.setattr(nixl_agent, "_packages", lambda: ["nixl_of_another_kind"])
    with pytest.raises(ConfigError, match="'nixl' needs nixl_of_another_kind, which does not load: No module named"):
        PullAgent(SOURCE, device, slot_bytes=SLOT_BYTES)
