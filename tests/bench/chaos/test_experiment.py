"""Experiments of `python -m bench chaos` on a service whose ranks are threads of this process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench.chaos.experiment import Experiment
from bench.chaos.faults import HIT_RANK, Cell, How, Kind, Phase, Processes
from bench.chaos.load import FIRST, Expected, answers_without_fault, begin, play, write_scripts
from bench.chaos.run import check_greedy
from bench.chaos.verdict import Outcome
from ringserve.client.async_client import AsyncClient
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.demo import document
from tests.orchestration.service import Service
from tests.services.local_gateway import LocalGateway, codec, model_path

__all__ = ["codec", "model_path"]
SECONDS = 120.0


class RankThreads(Processes):
    """Ranks of the first rings of a service in this process, in the place of processes. A hit ends the thread."""

    def __init__(self, service: Service) -> None:
        self._ranks = {"prefill-0": service.prefill_ranks, "decode-0": service.decode_ranks}
        self._kills: set[asyncio.Task[None]] = set()

    def look(self) -> dict[str, int]:
        return {f"{ring} rank {HIT_RANK}": id(ranks.made[HIT_RANK]) for ring, ranks in self._ranks.items()}

    def name_of(self, kind: Kind, ring: str) -> str:
        return f"{ring} rank {HIT_RANK}"

    def hit(self, name: str, how: How) -> int:
        rank = self._ranks[name.split()[0]].made[HIT_RANK]
        self._kills.add(asyncio.get_running_loop().create_task(rank.kill()))
        return id(rank)

    def resume(self) -> list[int]:
        return []


def document_ids(codec: TextCodec) -> list[int]:
    return [int(token) for token in codec.encode(document(codec))]


async def answers(gateway: LocalGateway, codec: TextCodec) -> list[Expected]:
    async with AsyncClient(gateway.target) as client:
        return await answers_without_fault(client, write_scripts(document_ids(codec)), SECONDS)


@pytest.fixture
def service(model_path: Path) -> Service:
    return Service(model_path, 2, 2, chunk_tokens=1024)


async def test_a_rank_that_dies_between_turns_is_noticed_and_harms_no_answer(
    model_path: Path, codec: TextCodec, service: Service
) -> None:
    async with LocalGateway(model_path, codec, service=service) as gateway:
        expected = await answers(gateway, codec)
        assert check_greedy(model_path, expected) > 0.0
        ranks = RankThreads(service)
        usual = await Experiment(gateway.target, ranks, expected, SECONDS).usual("usual-")
        experiment = Experiment(gateway.target, ranks, expected, SECONDS, usual)
        result = await experiment.run(Cell(Kind.DECODE_RANK, Phase.IDLE, How.KILL), "idle-")
        assert (result.outcome, result.reasons) == (Outcome.HELD, ())
        assert result.victim == "decode-0 rank 1"
        assert (result.streams, result.exact) == (16, 16)
        assert result.detect_seconds is not None
        assert result.sign
        assert result.free_blocks_before == result.free_blocks_after > 0
        assert result.longest_gap_seconds
        assert result.gap_ratio == pytest.approx(result.longest_gap_seconds / usual.gap_p99)


async def test_only_the_very_tokens_and_text_of_an_answer_are_exact(
    model_path: Path, codec: TextCodec, service: Service
) -> None:
    async with LocalGateway(model_path, codec, service=service) as gateway, AsyncClient(gateway.target) as client:
        scripts = write_scripts(document_ids(codec))
        unknown = [Expected(script=script, answers=((0, 0),), texts=("",)) for script in scripts]
        streams = begin(unknown, FIRST)
        await play(client, streams, "first-", SECONDS)
        assert not any(stream.is_exact for stream in streams)
        assert all(stream.difference.startswith("its tokens differ from place 0") for stream in streams)
        known = [
            replace(stream.expected, answers=(stream.answer.token_ids,), texts=(stream.answer.text,))
            for stream in streams
            if stream.answer
        ]
        known[3] = replace(known[3], texts=("other",))
        streams = begin(known, FIRST)
        await play(client, streams, "second-", SECONDS)
        assert [stream.difference for stream in streams] == [*3 * [""], "its text differs", *4 * [""]]
        assert all(stream.arrivals and stream.plan for stream in streams)
