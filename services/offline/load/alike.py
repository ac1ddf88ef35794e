"""Requests that begin alike: arrivals made of a trace with block ids, scaled down, and the cached share to expect.

`ringserve bench --divide` uses it. The trace has no text: tokens of a block are drawn by its id, so that equal ids are
equal tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringserve.client import RingInfo
from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.load.replay import OK, Arrival, Outcome
from ringserve.services.offline.planning.models import planned_model, to_model_info
from ringserve.services.offline.simulator.cluster import ClusterShape, PoolShape
from ringserve.services.offline.simulator.shared import ideal_share
from ringserve.services.offline.simulator.simulation import Simulation
from ringserve.services.offline.simulator.trace import BLOCK_TOKENS, TracedConversation, read_trace

KIND = "trace"
SIMULATED_MODEL = "llama3-8b"
"""Model of the simulated rings. It hardly matters: the cached share depends on the rings' room and on which prompts
begin alike."""


def read_requests(path: Path, limit: int) -> list[TracedConversation]:
    """Read the first requests of a trace with block ids. Raises ConfigError."""
    trace = read_trace(path)[:limit]
    if not all(each.block_ids for each in trace):
        raise ConfigError(f"--divide: {path} has no hash_ids; allowed are requests of Mooncake's form")
    return trace


def scaled(trace: Sequence[TracedConversation], divide: int, pace: float) -> list[Arrival]:
    """Return the requests with lengths divided by `divide` and times multiplied by `pace`."""
    return [
        Arrival(
            at=pace * each.start_seconds,
            kind=KIND,
            prompt_tokens=max(1, each.turns[0].new_tokens // divide),
            max_tokens=max(1, each.turns[0].output_tokens // divide),
            block_ids=each.block_ids,
            block_tokens=BLOCK_TOKENS // divide,
        )
        for each in trace
    ]


def count_differing(outcomes: Sequence[Outcome], model_path: Path, limit: int) -> tuple[int, int]:
    """Compare answers with stock transformers. Return how many were compared, and how many of these differ.

    Up to `limit` successful requests are picked, evenly in the order of their prompts.
    """
    # Here, not above: other commands do without torch, whose import takes longer than all else of them.
    from ringserve.services.offline.reference import StockModel

    done = sorted((each for each in outcomes if each.status == OK), key=lambda each: tuple(each.prompt))
    sample = done[:: max(1, len(done) // limit)][:limit] if limit else []
    stock = StockModel(model_path)
    differing = sum(tuple(stock.follow(each.prompt, each.token_ids).token_ids) != each.token_ids for each in sample)
    return len(sample), differing


def expected_shares(trace: Sequence[TracedConversation], rings: Sequence[RingInfo], divide: int) -> tuple[float, float]:
    """Return two expected cached shares: of a simulation with as many rings, and of one LRU cache.

    Each role, and the cache, has the room of the smaller of the two pools, times `divide`, because the lengths in
    `trace` are not divided.
    """
    prefill, decode = ([ring for ring in rings if ring.role == role] for role in ("prefill", "decode"))
    room = divide * min(sum(ring.capacity_tokens for ring in pool) for pool in (prefill, decode))
    model = planned_model(SIMULATED_MODEL)
    shape = ClusterShape(
        model=to_model_info(model),
        weights=model.weights,
        profile=read_profile("gtt"),
        prefill=PoolShape(num_rings=len(prefill), cp=1, tp=1),
        decode=PoolShape(num_rings=len(decode), cp=1, tp=1),
        kv_tokens=room,
    )
    return Simulation(shape, list(trace), "router").run().cached_share, ideal_share(trace, room)
