"""Ranks in processes of their own, with NIXL on host memory: a test kills them, or lets them stand still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from ringserve.workers.kv.nixl_agent import NixlAgent, ucx_settings
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.sender import KvSender
from tests.forking import forking
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    NUM_LAYERS,
    SLOT_BYTES,
    TOKENS,
    TRUTH,
    cache_of,
    expect_of,
    key_of,
    receiving,
    send_of,
    sending,
    wait_for_slots,
)

ENGINE = ucx_settings()
# UCX over TCP serves READs by its target's processor: one that stands still keeps them under way.
EMULATED = "PROTO_EMULATION_ENABLE=y,TLS=tcp,NET_DEVICES=lo"


class StillNixl(NixlAgent):
    """Agent that serves no peer while `is_still`, as in a process that was stopped."""

    is_still = False

    def progress(self) -> None:
        if not self.is_still:
            super().progress()


def open_agent(
    name: str, engine: str = ENGINE, make: Callable[..., NixlAgent] = NixlAgent, num_slots: int = 8
) -> PullAgent:
    """Make an agent on host memory, for which sockets are no way out."""
    return PullAgent(
        name,
        torch.device("cpu"),
        slot_bytes=SLOT_BYTES,
        num_slots=num_slots,
        is_required=True,
        make=partial(make, engine=engine),
    )


def run_source(pipe: Connection, engine: str) -> None:
    """Send the first layers of TRUTH to the endpoint that comes, and say so; with EMULATED, serve no READ of them."""
    torch.set_num_threads(1)
    agent, cache = open_agent("prefill-0/child", engine, StillNixl), cache_of()
    TRUTH.store(cache, BLOCKS, range(TOKENS))
    with sending(cache, agent=agent) as sender:
        endpoint, layers = pipe.recv()
        sender.begin(send_of(key_of(), endpoint, TOKENS, BLOCKS))
        lane = next(iter(sender._lanes.values()))
        is_by_nixl = lane._is_by_nixl  # type: ignore[attr-defined]

        def meet_and_stand_still(*arguments: object) -> object:
            answer = is_by_nixl(*arguments)
            StillNixl.is_still = engine == EMULATED
            return answer

        lane._is_by_nixl = meet_and_stand_still  # type: ignore[attr-defined]
        for layer in range(layers):
            sender.layer_ready(key_of(), layer)
        wait_until_sent(sender, layers)
        if engine != EMULATED:
            wait_for_slots(agent.out, agent.out.num_slots)
        pipe.send("sent")
        pipe.poll(WAIT_SECONDS)


def wait_until_sent(sender: KvSender, layers: int) -> None:
    """Wait until as many layers have left."""
    transfer = sender._sending[key_of()].transfer
    with transfer._changed:
        assert transfer._changed.wait_for(lambda: transfer._unsent == NUM_LAYERS - layers, WAIT_SECONDS)


def run_destination(pipe: Connection, engine: str) -> None:
    """Expect TRUTH, say where, and receive it until the end."""
    torch.set_num_threads(1)
    with receiving(cache_of(), agent=open_agent(DESTINATION, engine)) as receiver:
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        pipe.send(receiver.endpoint)
        pipe.poll(WAIT_SECONDS)


@contextmanager
def process_of(
    target: Callable[[Connection, str], None], engine: str = ENGINE
) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run a rank in a process, which is killed at the end."""
    context = forking()
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, engine), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join(WAIT_SECONDS)
        here.close()


def hear(pipe: Connection) -> object:
    """Return the next message of a process."""
    assert pipe.poll(WAIT_SECONDS), "the process says nothing"
    return pipe.recv()
