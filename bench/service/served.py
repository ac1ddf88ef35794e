"""`python -m bench prefill|decode` of the whole service, beside stock transformers on the same cores.

A turn goes through gateway, router and rings, alone. transformers computes the same turn in a process of its own, with
a thread for every core, while the service is idle.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import mean, median

import grpc
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import DynamicCache

from bench.report import Report, Row, Target
from bench.rings.ring_processes import RankPlace, RingProcesses
from bench.rings.rounds import Contender, Sample, alternate
from ringserve.client.channel import CLIENT_OPTIONS
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.cluster.local import LocalCluster
from ringserve.services.config import Config, LogConfig, MetricsConfig
from ringserve.services.offline.reference import StockModel
from ringserve.services.offline.reports import paired_ratio
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import TokenIds

SERVICE = "service"
STOCK = "transformers"
TURN_SECONDS = 600.0
CONTROL_SECONDS = 30.0
POLL_SECONDS = 0.2

# Targets on 2 cores, fp32, rings of two ranks of one thread.
TARGET_RANKS = 2
LONG_PROMPT = 2048
TTFT_OVER_STOCK = 1.0
TTIT_OVER_STOCK = 0.9
TTIT_OUTSIDE_SECONDS = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Turn of a measurement. It begins a conversation, or continues that of the turn before; `name` is its name."""

    token_ids: TokenIds
    max_tokens: int
    name: str
    is_first: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTimes:
    """Seconds from the request to each token of its answer, and what they were spent on, as far as the service tells.

    `steps_seconds` are those of the `num_steps` prefill steps, `queue_seconds` the rest of the time on the prefill
    ring. `handoff_seconds` run from the first token to the first one of the decode ring.
    """

    tokens: tuple[float, ...]
    token_ids: tuple[int, ...] = ()
    queue_seconds: float = 0.0
    steps_seconds: float = 0.0
    num_steps: int = 0
    handoff_seconds: float = 0.0

    @property
    def ttft(self) -> float:
        return self.tokens[0]

    @property
    def ttit(self) -> float:
        """Mean time between tokens, without the gap after the first one, in which the KV reaches the decode ring."""
        return (self.tokens[-1] - self.tokens[1]) / (len(self.tokens) - 2)


class StockTurns:
    """Runner of turns in transformers, in a process of its own, with a thread for every core."""

    def __init__(self, model: str, place: RankPlace) -> None:
        assert place.num_ranks == 1, "transformers runs in one process"
        self._stock = StockModel(resolve_model_path(model))
        self._caches: dict[str, DynamicCache] = {}
        self._last: dict[str, int] = {}

    def measure(self, turn: Turn) -> TurnTimes:
        torch.set_num_threads(num_cores())
        if turn.is_first:
            # One conversation is in memory at a time.
            self._caches, self._last = {turn.name: DynamicCache()}, {}
        # The KV of an answer's last token is computed in the next turn.
        before = [self._last[turn.name]] if turn.name in self._last else []
        prompt = [*before, *turn.token_ids.tolist()]
        answer = self._stock.greedy(prompt, turn.max_tokens, cache=self._caches[turn.name])
        self._last[turn.name] = answer.token_ids[-1]
        return TurnTimes(tokens=answer.seconds)

    def close(self) -> None:
        """Do nothing: transformers runs until its process ends."""


class ServedTurns:
    """Client of a service, which measures turns and the steps of its decode ring."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=CLIENT_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        info = self._stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=CONTROL_SECONDS)
        self._decode_metrics = next(
            ring.metrics_endpoint for ring in info.rings if ring.role == inference_pb2.ROLE_DECODE
        )

    def measure(self, turn: Turn) -> TurnTimes:
        """Run a turn to its end. Raises Unavailable if the service refuses or loses it."""
        request = inference_pb2.GenerateRequest(
            tokenized=inference_pb2.TokenizedInput(input_ids=turn.token_ids.tolist()),
            sampling_params=inference_pb2.SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True),
            conversation_id=turn.name,
            prompt_mode=inference_pb2.PROMPT_MODE_WHOLE_HISTORY if turn.is_first else inference_pb2.PROMPT_MODE_APPEND,
        )
        tokens, token_ids = list[float](), list[int]()
        plan = inference_pb2.Plan()
        began = time.perf_counter()
        try:
            for response in self._stub.Generate(request, timeout=TURN_SECONDS):
                if response.HasField("chunk"):
                    tokens += [time.perf_counter() - began] * len(response.chunk.token_ids)
                    token_ids += response.chunk.token_ids
                elif response.HasField("complete"):
                    plan = response.complete.plan
        except grpc.RpcError as failure:
            raise Unavailable(f"a turn of {len(turn.token_ids)} tokens failed: {failure}") from None
        return TurnTimes(
            tokens=tuple(tokens),
            token_ids=tuple(token_ids),
            queue_seconds=plan.queue_seconds,
            steps_seconds=plan.prefill_seconds,
            num_steps=len(plan.chunks),
            handoff_seconds=plan.handoff_seconds,
        )

    def forget(self, name: str) -> None:
        """Delete a conversation and its KV."""
        request = inference_pb2.DeleteConversationRequest(conversation_id=name)
        self._stub.DeleteConversation(request, timeout=CONTROL_SECONDS)

    def decode_steps(self, at_least: float = 0.0) -> tuple[float, float]:
        """Return (number, seconds) of all steps of the decode ring's first rank, once metrics count `at_least` steps.

        Ranks report about once a second. Raises Unavailable if the count stays lower for CONTROL_SECONDS.
        """
        deadline = time.monotonic() + CONTROL_SECONDS
        while True:
            number, seconds = self._decode_steps()
            if number >= at_least:
                return number, seconds
            if time.monotonic() > deadline:
                raise Unavailable(f"metrics of the decode ring count {number:g} steps, not {at_least:g}")
            time.sleep(POLL_SECONDS)

    def _decode_steps(self) -> tuple[float, float]:
        url = f"http://{self._decode_metrics}/metrics"
        with urllib.request.urlopen(url, timeout=CONTROL_SECONDS) as page:
            families = text_string_to_metric_families(page.read().decode())
        found = {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("rank") == "0"
        }
        return found["ringserve_rank_steps_total"], found["ringserve_rank_step_seconds_total"]

    def close(self) -> None:
        self._channel.close()


@contextmanager
def served(config: Config, model: str, ranks: int) -> Iterator[ServedTurns]:
    """Yield a client of a service that is started for the context: a ring of `ranks` for each role."""
    # Free ports avoid clashes with other clusters; info lines would break the progress bar.
    config = replace(
        config,
        model=replace(config.model, path=model),
        prefill=replace(config.prefill, cp=ranks),
        decode=replace(config.decode, cp=ranks),
        gateway=replace(config.gateway, listen="127.0.0.1:0", metrics="", http=""),
        metrics=MetricsConfig(router="", prefill=""),
        logs=LogConfig(level="warning"),
    )
    cluster = LocalCluster(config)
    turns = None
    try:
        cluster.start()
        turns = ServedTurns(cluster.gateway_address)
        yield turns
    finally:
        if turns is not None:
            turns.close()
        cluster.stop()


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def num_measurements(ranks: Sequence[int], tokens: Sequence[int], num_rounds: int) -> int:
    return len(ranks) * len(tokens) * (num_rounds + 1) * 2


Tell = Callable[[str], None]
# A first token, and one of the decode ring, which ends the hand-off.
TTFT_TOKENS = 2
# Tokens of the warm-up prompt: some memory is allocated on first use.
WARM_UP_TOKENS = 512


class DrawnTurns:
    """Random turns for one contender; a second object of the same name draws the same ones for the other contender."""

    def __init__(self, vocab_size: int, name: str) -> None:
        self._vocab_size = vocab_size
        self._name = name
        self._seeds = count()

    def turn(self, num_tokens: int, max_tokens: int, *, is_new: bool) -> Turn:
        seed = next(self._seeds)
        return Turn(
            token_ids=np.random.default_rng((num_tokens, seed)).integers(self._vocab_size, size=num_tokens),
            max_tokens=max_tokens,
            name=f"{self._name}-{seed}" if is_new else self._name,
            is_first=is_new or not seed,
        )


def measure_served_prefill(
    model: str, config: Config, ranks: Sequence[int], tokens: Sequence[int], num_rounds: int, tell: Tell
) -> Report:
    """Measure TTFT of prompts that share nothing. Raises ModelRefused, Unavailable, ConfigError."""
    rows: list[Row] = []
    info = _info(model, tokens, TTFT_TOKENS)
    for size in ranks:
        with served(config, model, size) as service, RingProcesses(1, partial(StockTurns, model)) as stock:
            for length in tokens:
                rows += _prefill_rows(service, stock, info, size, length, num_rounds, tell)
    targets = [
        Target(f"TTFT over transformers, {_where(row)}", over_stock, TTFT_OVER_STOCK, is_at_least=False)
        for row in rows
        if (over_stock := row.number("over_stock")) is not None
        and row.keys["ranks"] == TARGET_RANKS
        and int(row.keys["tokens"]) >= LONG_PROMPT
    ]
    return Report(bench="prefill", settings=_settings(info), rows=tuple(rows), targets=tuple(targets))


def _prefill_rows(
    service: ServedTurns, stock: RingProcesses, info: ModelInfo, size: int, length: int, num_rounds: int, tell: Tell
) -> list[Row]:
    seen: list[TurnTimes] = []
    for_service, for_stock = DrawnTurns(info.vocab_size, f"p{length}"), DrawnTurns(info.vocab_size, f"p{length}")

    def by_service(num_tokens: int) -> list[Sample]:
        turn = for_service.turn(num_tokens, TTFT_TOKENS, is_new=True)
        seen.append(service.measure(turn))
        service.forget(turn.name)
        return [Sample(seconds=seen[-1].ttft)]

    def by_stock(num_tokens: int) -> list[Sample]:
        (times,) = stock.ask(for_stock.turn(num_tokens, TTFT_TOKENS, is_new=True))
        return [Sample(seconds=times.ttft)]

    def contenders(num_tokens: int) -> list[Contender]:
        return [
            Contender(SERVICE, size, partial(by_service, num_tokens)),
            Contender(STOCK, num_cores(), partial(by_stock, num_tokens)),
        ]

    alternate(contenders(min(length, WARM_UP_TOKENS)), 1, tell)
    seen.clear()
    measured = alternate(contenders(length), num_rounds, tell)
    ours, theirs = measured[SERVICE, size], measured[STOCK, num_cores()]
    return [
        Row(
            keys={"tokens": length, "what": SERVICE, "ranks": size},
            figures={
                "seconds": ours.figures,
                "over_stock": paired_ratio(ours.seconds, theirs.seconds),
                "queue_seconds": median(each.queue_seconds for each in seen),
                "num_steps": round(median(each.num_steps for each in seen)),
                "steps_seconds": median(each.steps_seconds for each in seen),
                "outside_seconds": median(each.ttft - each.queue_seconds - each.steps_seconds for each in seen),
                "handoff_seconds": median(each.handoff_seconds for each in seen),
            },
        ),
        Row(keys={"tokens": length, "what": STOCK, "ranks": num_cores()}, figures={"seconds": theirs.figures}),
    ]


def measure_served_decode(
    model: str, config: Config, ranks: Sequence[int], contexts: Sequence[int], steps: int, num_rounds: int, tell: Tell
) -> Report:
    """Measure TTIT of one stream in conversations that grow by a turn of `steps` tokens a round.

    Raises ModelRefused, Unavailable, ConfigError.
    """
    rows: list[Row] = []
    info = _info(model, contexts, (num_rounds + 1) * (steps + 2))
    for size in ranks:
        with served(config, model, size) as service, RingProcesses(1, partial(StockTurns, model)) as stock:
            for context in contexts:
                rows += _decode_rows(service, stock, info, size, context, steps, num_rounds, tell)
    return Report(
        bench="decode", settings=_settings(info), rows=tuple(rows), targets=tuple(_decode_targets(rows)), notes=()
    )


def _decode_rows(
    service: ServedTurns,
    stock: RingProcesses,
    info: ModelInfo,
    size: int,
    context: int,
    steps: int,
    num_rounds: int,
    tell: Tell,
) -> list[Row]:
    name = f"d{context}"
    for_service, for_stock = DrawnTurns(info.vocab_size, name), DrawnTurns(info.vocab_size, name)

    def by_service(num_tokens: int) -> list[Sample]:
        return [Sample(seconds=service.measure(for_service.turn(num_tokens, steps + 2, is_new=False)).ttit)]

    def by_stock(num_tokens: int) -> list[Sample]:
        (times,) = stock.ask(for_stock.turn(num_tokens, steps + 2, is_new=False))
        return [Sample(seconds=times.ttit)]

    def contenders(num_tokens: int) -> list[Contender]:
        return [
            Contender(SERVICE, size, partial(by_service, num_tokens)),
            Contender(STOCK, num_cores(), partial(by_stock, num_tokens)),
        ]

    # The first turn makes the context, and warms up. A turn's first token is sampled in prefill.
    first, _ = service.decode_steps()
    alternate(contenders(context), 1, tell)
    before, seconds_before = service.decode_steps(first + steps + 1)
    measured = alternate(contenders(1), num_rounds, tell)
    after, seconds_after = service.decode_steps(before + num_rounds * (steps + 1))
    service.forget(name)
    ours, theirs = measured[SERVICE, size], measured[STOCK, num_cores()]
    in_steps = (seconds_after - seconds_before) / (after - before)
    return [
        Row(
            keys={"tokens": context, "what": SERVICE, "ranks": size},
            figures={
                "seconds": ours.figures,
                "over_stock": paired_ratio(ours.seconds, theirs.seconds),
                "steps_seconds": in_steps,
                "outside_seconds": mean(ours.seconds) - in_steps,
            },
        ),
        Row(keys={"tokens": context, "what": STOCK, "ranks": num_cores()}, figures={"seconds": theirs.figures}),
    ]


def _decode_targets(rows: Sequence[Row]) -> Iterator[Target]:
    for row in rows:
        if (row.keys["what"], row.keys["ranks"]) != (SERVICE, TARGET_RANKS):
            continue
        over_stock, outside = row.number("over_stock"), row.number("outside_seconds")
        assert over_stock is not None and outside is not None
        yield Target(f"TTIT over transformers, {_where(row)}", over_stock, TTIT_OVER_STOCK, is_at_least=False)
        text = f"seconds a token outside steps, {_where(row)}"
        yield Target(text, outside, TTIT_OUTSIDE_SECONDS, is_at_least=False)


def _where(row: Row) -> str:
    return f"{row.keys['ranks']} ranks, {row.keys['tokens']} tokens"


def _info(model: str, tokens: Sequence[int], answer: int) -> ModelInfo:
    """Return the model's sizes. Raises ModelRefused, and ConfigError if it has too few positions."""
    info = read_model_info(resolve_model_path(model), "float32", model)
    most = info.max_positions - answer
    if max(tokens) > most:
        raise ConfigError(f"{max(tokens)} tokens do not fit in the model's positions; at most {most} are allowed")
    return info


def _settings(info: ModelInfo) -> str:
    size = f"{info.num_parameters / 1e6:.1f} M parameters"
    return f"{info.name}, {size}, the whole service, equal rings for prefill and decode, one stream"
