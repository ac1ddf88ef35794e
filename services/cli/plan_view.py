"""A turn's plan on the terminal."""

from __future__ import annotations

import sys

from rich.table import Table

from ringserve.v1 import inference_pb2
from services.offline.planning.units import format_seconds
from services.offline.tables import console, simple_table
from services.rpc.answer import plan_line


def show_plan(complete: inference_pb2.GenerateComplete) -> None:
    """On standard error: the plan in a line, and the prefill rings that were compared."""
    print(plan_line(complete), file=sys.stderr, flush=True)
    if complete.plan.ring_alternatives:
        console(stderr=True).print(ring_table(complete.plan))


def ring_table(plan: inference_pb2.Plan) -> Table:
    """One line a ring, the quickest first; * marks the one that was taken."""
    table = simple_table("", "ring", "cp", "tp", "predicted", "queue", "moving KV", "prefill", left=("", "ring"))
    for each in sorted(plan.ring_alternatives, key=lambda each: each.total_seconds):
        seconds = (each.total_seconds, each.queue_seconds, each.move_seconds, each.prefill_seconds)
        table.add_row(
            "*" if each.ring == plan.prefill_ring else "",
            each.ring,
            str(each.num_ranks),
            str(each.tp),
            *map(format_seconds, seconds),
        )
    return table
