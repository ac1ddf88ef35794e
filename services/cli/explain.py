"""`ringserve explain`: the algorithm of a turn, the reason, and the cost of every alternative. It needs no cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.cost.selector import POLICIES
from ringserve.cp_core.cost.sparse import read_losses
from ringserve.services.cli.command import command, one_of, option
from ringserve.services.cli.options import JsonFlag
from ringserve.services.offline.planning.explanation import Explanation, RingComparison, compare_rings, explain_turn
from ringserve.services.offline.planning.models import planned_model
from ringserve.services.offline.planning.report import (
    comparison_json,
    comparison_line,
    comparison_table,
    explanation_json,
    explanation_lines,
    explanation_table,
)
from ringserve.services.offline.planning.sizing import RingShape, require_tp
from ringserve.services.offline.terminal import console, print_lines, print_table
from ringserve.services.offline.units import parse_sizes, parse_tokens


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    model: str = option("a shipped shape, or a model directory", "DIR_OR_NAME")
    hardware: str = option("a shipped profile or a file", "PROFILE", "gtt")
    tokens: str = option("new tokens, e.g. 3200 or 8k", "T")
    cached: str = option("cached tokens before them", "P", "0")
    ranks: str = option("ranks of the ring, or of several to compare", "N,...")
    tp: str = option("processes of a rank", "N,...", "1")
    decode_ranks: int | None = option(
        "ranks of a decode ring that holds the cached tokens, and may compute the turn itself", default=None, min=1
    )
    decode_tp: int = option("processes of a rank of the decode ring", default=1, min=1)
    missing: str = option("cached tokens that only the decode ring retains", "TOKENS", "0")
    selector: str = one_of("selection policy", POLICIES, "auto")
    sparse_losses: Path | None = option("show approximate prefills too, by what calibrate --sparse wrote", default=None)
    json: JsonFlag = False


@command(
    "ringserve explain --model llama3-405b-fp8 --hardware gtt --tokens 3200 --cached 124800 --ranks 4 --tp 8",
    "ringserve explain --model llama3-70b --hardware gtt --tokens 2k --ranks 1,2,4,8 --tp 8",
    "ringserve explain --model llama3-70b --hardware gti --tokens 8k --ranks 2 --tp 8 --json",
    "ringserve explain --model llama3-8b --tokens 20 --cached 128k --missing 300 --ranks 4 --decode-ranks 2",
    description="""The costs are predicted from a hardware profile, for one turn that an idle ring computes in one
step; * marks the choice. Several sizes (--ranks 1,2,4) are compared; * marks the ring that a router would take. Columns
are seconds of linear layers, tensor-parallel sums, attention, messages that attention does not hide (exposed) and does
hide (hidden), all-to-all, and overhead.""",
)
def explain(options: ExplainOptions) -> int:
    model, profile = planned_model(options.model), read_profile(options.hardware)
    ranks, widths = parse_sizes("--ranks", options.ranks), parse_sizes("--tp", options.tp)
    for tp in (*widths, options.decode_tp):
        require_tp(model, tp)
    losses = None if options.sparse_losses is None else read_losses(options.sparse_losses)
    decode = None if options.decode_ranks is None else RingShape(cp=options.decode_ranks, tp=options.decode_tp)
    rings = [
        explain_turn(
            model,
            profile,
            RingShape(cp=cp, tp=tp),
            policy=options.selector,
            new_tokens=parse_tokens("--tokens", options.tokens),
            cached_tokens=_tokens_or_zero("--cached", options.cached),
            decode=decode,
            missing_tokens=_tokens_or_zero("--missing", options.missing),
            losses=losses,
        )
        for tp in widths
        for cp in ranks
    ]
    if len(rings) == 1:
        _show_one(rings[0], as_json=options.json)
    else:
        _show_several(compare_rings(rings), as_json=options.json)
    return 0


def _show_one(explanation: Explanation, *, as_json: bool) -> None:
    if as_json:
        print(explanation_json(explanation))
    else:
        print_table(console(), explanation_table(explanation), num_keys=2)
        print_lines(*explanation_lines(explanation))


def _show_several(comparison: RingComparison, *, as_json: bool) -> None:
    if as_json:
        print(comparison_json(comparison))
    else:
        print_table(console(), comparison_table(comparison), num_keys=3)
        print_lines(comparison_line(comparison), *explanation_lines(comparison.chosen))


def _tokens_or_zero(key: str, text: str) -> int:
    return 0 if text == "0" else parse_tokens(key, text)
