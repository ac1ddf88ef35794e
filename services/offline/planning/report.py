"""Reports of `ringserve plan` and `ringserve explain`: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.table import Table

from ringserve.services.offline.planning.explanation import DirectPrefill, Explanation, RingComparison
from ringserve.services.offline.planning.proposal import Proposal, Traffic
from ringserve.services.offline.planning.sizing import GIGABYTE, RingForecast, Workload
from ringserve.services.offline.terminal import simple_table
from ringserve.services.offline.units import format_seconds, format_tokens

LEFT_ALIGNED = ("how", "", "pool")
_table = partial(simple_table, left_aligned=LEFT_ALIGNED)


def plan_json(forecasts: Sequence[RingForecast], proposal: Proposal | None) -> str:
    """Format one JSON object: `rings`, and `proposal`, which is null without a rate."""
    proposed = None if proposal is None else asdict(proposal) | {"ratio": proposal.ratio}
    rings = [
        asdict(forecast) | {"contexts": [asdict(context) | {"fits": context.fits} for context in forecast.contexts]}
        for forecast in forecasts
    ]
    return json.dumps({"rings": rings, "proposal": proposed})


def plan_table(forecasts: Sequence[RingForecast]) -> Table:
    """Return a table with a line for each ring and context; "no" marks contexts that do not fit."""
    table = _table(
        "", "cp", "tp", "context", "algorithm", "TTFT", "tokens/s", "TTIT", "KV GB a process", "contexts that fit"
    )
    for forecast in forecasts:
        for context in forecast.contexts:
            table.add_row(
                "" if context.fits else "no",
                str(forecast.shape.cp),
                str(forecast.shape.tp),
                format_tokens(context.tokens),
                context.algorithm,
                format_seconds(context.ttft_seconds),
                f"{context.prompt_tokens_per_second:.0f}",
                format_seconds(context.ttit_seconds),
                f"{context.kv_bytes / GIGABYTE:.2f}",
                str(context.max_contexts),
            )
    return table


def proposal_table(proposal: Proposal) -> Table:
    """Return a table of the two pools."""
    table = _table("pool", "rings", "cp", "tp", "processes", "busy or batch", "seconds")
    prefill, decode = proposal.prefill, proposal.decode
    ttft = ", ".join(map(format_seconds, prefill.ttft_seconds))
    shape = prefill.shape
    table.add_row(
        "prefill",
        str(prefill.num_rings),
        str(shape.cp),
        str(shape.tp),
        str(prefill.num_processes),
        f"busy {prefill.busy:.0%}",
        f"mean TTFT {ttft}, of which {format_seconds(prefill.wait_seconds)} is waiting",
    )
    shape = decode.shape
    table.add_row(
        "decode",
        str(decode.num_rings),
        str(shape.cp),
        str(shape.tp),
        str(decode.num_processes),
        f"batch {decode.batch}",
        f"TTIT {format_seconds(decode.ttit_seconds)}, {decode.tokens_per_second:.0f} tokens/s a ring",
    )
    return table


def proposal_lines(proposal: Proposal, workload: Workload, traffic: Traffic) -> list[str]:
    """Return the summary of a proposal in words."""
    mix = ", ".join(f"{each.share:.0%} with {format_tokens(each.tokens)} tokens" for each in workload.contexts)
    return [
        f"prefill:decode {proposal.ratio} by processes, {proposal.num_processes} in all, for "
        f"{traffic.turns_per_second:.3g} turns/s ({mix}), {traffic.output_tokens} tokens out each",
    ]


def explanation_json(explanation: Explanation) -> str:
    """Format one JSON object, each alternative with its total."""
    return json.dumps(_explanation_dict(explanation))


def comparison_json(comparison: RingComparison) -> str:
    """Format one JSON object: the explanations of all `rings`, the shape of the `chosen` one, and the reason."""
    rings = [_explanation_dict(each) for each in comparison.rings]
    return json.dumps({"rings": rings, "chosen": asdict(comparison.chosen.shape), "reason": comparison.reason})


def _explanation_dict(explanation: Explanation) -> dict[str, object]:
    alternatives = [asdict(each) | {"total_seconds": each.cost.total_seconds} for each in explanation.alternatives]
    step = asdict(explanation.step) | {"total_seconds": explanation.step.total_seconds}
    return asdict(explanation) | {"alternatives": alternatives, "step": step}


def comparison_table(comparison: RingComparison) -> Table:
    """Return a table with a line for each ring; * marks the ring that a router would take."""
    table = _table("", "cp", "tp", "processes", "algorithm", "prefill", "linear", "attention", "exposed", "decode step")
    for ring in comparison.rings:
        (cost,) = (each.cost for each in ring.alternatives if each.is_chosen)
        parts = (cost.total_seconds, cost.linear_seconds, cost.attention_seconds, cost.exposed_seconds)
        table.add_row(
            "*" if ring is comparison.chosen else "",
            str(ring.shape.cp),
            str(ring.shape.tp),
            str(ring.shape.num_processes),
            ring.chosen.algorithm,
            *map(format_seconds, (*parts, ring.step.total_seconds)),
        )
    return table


def comparison_line(comparison: RingComparison) -> str:
    """Return the choice and its reason."""
    chosen = comparison.chosen
    return f"{chosen.shape} takes {format_seconds(chosen.seconds)}: {comparison.reason}"


def explanation_table(explanation: Explanation) -> Table:
    """Return a table with a line for each alternative."""
    table = _table("", "how", "total", "linear", "sums", "attention", "exposed", "hidden", "all-to-all", "overhead")
    for each in explanation.alternatives:
        cost = each.cost
        table.add_row(
            "*" if each.is_chosen else "",
            each.name,
            *(
                format_seconds(seconds)
                for seconds in (
                    cost.total_seconds,
                    cost.linear_seconds,
                    cost.sum_seconds,
                    cost.attention_seconds,
                    cost.exposed_seconds,
                    cost.hidden_seconds,
                    cost.all_to_all_seconds,
                    cost.overhead_seconds,
                )
            ),
        )
    return table


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return the choice, its reason, and the choice of `auto` if an algorithm was forced."""
    step = explanation.step
    return [
        *([] if explanation.direct is None else [_direct_line(explanation.direct)]),
        f"{explanation.policy} takes {explanation.chosen.algorithm}: {explanation.chosen.reason}",
        *(
            [f"auto would take {explanation.unforced.algorithm}: {explanation.unforced.reason}"]
            if explanation.unforced is not None
            else []
        ),
        *(
            f"with a share of {each.keep:g} of other ranks' keys, an approximate prefill would take "
            f"{format_seconds(each.seconds)}, at a loss of {each.loss:.3g} nats a token by measurements at "
            f"{each.measured_tokens} tokens"
            for each in explanation.sparse
        ),
        f"after that, {format_seconds(step.total_seconds)} a token on a decode ring of the same shape, by "
        f"{step.variant}",
    ]


def _direct_line(direct: DirectPrefill) -> str:
    seconds, via_prefill = format_seconds(direct.cost.total_seconds), format_seconds(direct.via_prefill_ring_seconds)
    parts = ((direct.move_seconds, "pull"), (direct.prefill_seconds, "prefill"), (direct.handoff_seconds, "hand-off"))
    steps = ", ".join(f"{name} {format_seconds(part)}" for part, name in parts)
    verdict = "sooner" if direct.is_sooner else "no sooner"
    ring = f"a decode ring of {direct.shape.cp} rank{'' if direct.shape.cp == 1 else 's'}"
    other = f"by way of a prefill ring, in {via_prefill} ({steps})"
    return f"{ring} computes the turn itself in {seconds}, {verdict} than {other}"
