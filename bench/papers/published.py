"""Tables of arXiv 2411.01783: Llama 3 405B with FP8 MLPs on the platform GTT. Times in seconds.

The package's CSV files hold the tables. `bench papers` compares predictions with them; `bench systems` and tests of the
cost model use the model.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from ringserve.cp_core.cost.fit import PrefillSample, StepPart, StepSample
from ringserve.cp_core.cost.model import PASS_KV, PASS_Q
from ringserve.services.offline.planning.models import PlannedModel, planned_model

MODEL = "llama3-405b-fp8"
PROFILE = "gtt"
TABLE_4_RANKS = 4
TABLE_5_TOKENS = 128_000
TP = 8
# The paper's pass-Q returns partial outputs in bf16.
PARTIAL_BYTES = 2
# Weight of a column of table 8 that is a part of its last one: the parts do not add up to the last.
PART_WEIGHT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPrefill:
    """Published TTFT; `label` names its row."""

    table: str
    label: str
    sample: PrefillSample


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedStep:
    """Published TTIT, or a column of table 8."""

    table: str
    label: str
    sample: StepSample


def published_model() -> PlannedModel:
    """Return the paper's model, with partial outputs in bf16."""
    model = planned_model(MODEL)
    return replace(model, shape=replace(model.shape, partial_bytes=PARTIAL_BYTES))


def table_4() -> list[PublishedPrefill]:
    """Return the rows of 14 turns, pass-KV and then pass-Q of each."""
    rows = []
    for row in _read("prefill_pass_kv_vs_pass_q.csv"):
        new, cached = int(row["new_tokens_T"]), int(row["cached_tokens_P"])
        for algorithm in (PASS_KV, PASS_Q):
            sample = PrefillSample(
                cp=TABLE_4_RANKS,
                tp=TP,
                algorithm=algorithm,
                new_tokens=new,
                cached_tokens=cached,
                seconds=float(row[f"{algorithm}_ms"]) / 1e3,
            )
            label = f"CP4 {algorithm} T={new} P={cached}"
            rows.append(PublishedPrefill(table="4", label=label, sample=sample))
    return rows


def full_prefills() -> list[PublishedPrefill]:
    """Return the TTFT of tables 6 and 7 and of section 4.2, each once, in the order of tp, cp and context."""
    found: dict[tuple[int, int, int], PublishedPrefill] = {}
    for row in _read("ttft_ttit_ms.csv"):
        cp, tp = _parallelism(row["parallelism"])
        context = int(row["context_tokens"])
        sample = PrefillSample(
            cp=cp, tp=tp, algorithm=PASS_KV, new_tokens=context, cached_tokens=0, seconds=float(row["ttft_ms"]) / 1e3
        )
        label = f"{row['parallelism']} T={context}"
        # Table 7 repeats two rows of table 6.
        found.setdefault((tp, cp, context), PublishedPrefill(table=row["table"], label=label, sample=sample))
    return [found[key] for key in sorted(found)]


def token_times() -> list[PublishedStep]:
    """Return the TTIT of tables 6 and 7, each once; both values of CP2 at 128K, where the tables disagree."""
    rows: dict[StepSample, PublishedStep] = {}
    for row in _read("ttft_ttit_ms.csv"):
        if row["ttit_ms"]:
            cp, tp = _parallelism(row["parallelism"])
            context, seconds = int(row["context_tokens"]), float(row["ttit_ms"]) / 1e3
            sample = StepSample(cp=cp, tp=tp, batch=1, context_tokens=context, part=StepPart.STEP, seconds=seconds)
            label = f"{row['parallelism']} context {context}"
            rows.setdefault(sample, PublishedStep(table=row["table"], label=label, sample=sample))
    return list(rows.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedIteration:
    """Row of table 5, on CP4 with 128,000 tokens in all.

    Seconds of the exchange and the attention of one ring iteration, and of pass-Q's one all-to-all.
    """

    algorithm: str
    new_tokens: int
    exchange_seconds: float
    attention_seconds: float
    all_to_all_seconds: float | None

    @property
    def cached_tokens(self) -> int:
        return TABLE_5_TOKENS - self.new_tokens


def table_5() -> list[PublishedIteration]:
    """Return the four rows of table 5."""
    return [
        PublishedIteration(
            algorithm=row["algorithm"],
            new_tokens=int(row["new_tokens_T"]),
            exchange_seconds=float(row["sendrecv_us"]) / 1e6,
            attention_seconds=float(row["attention_us"]) / 1e6,
            all_to_all_seconds=float(row["all2all_us"]) / 1e6 if row["all2all_us"] else None,
        )
        for row in _read("ring_breakdown_us.csv")
    ]


def table_8() -> list[PublishedStep]:
    """Return the times of table 8 that are not 0 and do not repeat another."""
    columns = {
        "attention_op_us": StepPart.CALL,
        "ring_attention_us": StepPart.ATTENTION,
        "sendrecv_us": StepPart.HOPS,
        "all2all_us": StepPart.COLLECTIVE,
        "whole_pass_q_us": StepPart.WHOLE,
    }
    rows = []
    for row in _read("decode_attention_us.csv"):
        cp, tp = _parallelism(row["parallelism"])
        context, batch = int(row["context_tokens"]), int(row["batch"])
        for column, part in columns.items():
            # On one rank both of these columns, and the whole, are the one attention call.
            is_repeated = cp == 1 and part in (StepPart.CALL, StepPart.ATTENTION)
            if float(row[column]) and not is_repeated:
                weight = 1.0 if part is StepPart.WHOLE else PART_WEIGHT
                sample = StepSample(
                    cp=cp,
                    tp=tp,
                    batch=batch,
                    context_tokens=context,
                    part=part,
                    seconds=float(row[column]) / 1e6,
                    weight=weight,
                )
                label = f"{row['parallelism']} B={batch} context {context} {column.removesuffix('_us')}"
                rows.append(PublishedStep(table="8", label=label, sample=sample))
    return rows


def _read(name: str) -> Iterator[Mapping[str, str]]:
    text = files("bench.papers").joinpath("published", name).read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def _parallelism(name: str) -> tuple[int, int]:
    """Parse "CP2+TP8" or "TP16" into (cp, tp)."""
    sizes = dict(re.findall(r"(CP|TP)(\d+)", name))
    return int(sizes.get("CP", 1)), int(sizes["TP"])
