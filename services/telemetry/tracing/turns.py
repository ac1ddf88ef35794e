"""The span of a turn as its client sees it. It holds numbers and names of ours, and nothing of prompt or answer."""

from __future__ import annotations

import time

from orchestration.protocol.tracing import Stretch
from orchestration.protocol.turns import BegunTurn
from ringserve.v1 import inference_pb2
from services.telemetry.tracing.tracer import ServiceTracer
from workers.protocol.steps import FinishReason

FINE = tuple(reason.value for reason in FinishReason)


class TurnTrace:
    """From the client's request to the last response. `parent` is for those who do a part of the turn.

    Its own part is `plan`: until the router has chosen the rings and they have reserved. The rings tell theirs.
    """

    def __init__(self, tracer: ServiceTracer, trace_parent: str, request_id: str, tenant: str, began: float) -> None:
        """`trace_parent` is what the client sent, `began` on the clock of `time.monotonic`."""
        attributes = {"ringserve.request_id": request_id, **({"ringserve.tenant": tenant} if tenant else {})}
        self._tracer = tracer
        self._asked_at = time.monotonic()
        self._span = tracer.begin("turn", trace_parent, began, attributes)

    @property
    def parent(self) -> str:
        return self._span.trace_parent

    def planned(self, begun: BegunTurn) -> None:
        """The router has answered."""
        plan = begun.plan
        self._span.note(
            {
                "gen_ai.usage.input_tokens": begun.prompt_tokens,
                "ringserve.turn_id": begun.turn_id,
                "ringserve.algorithm": plan.algorithm.value,
                "ringserve.new_tokens": plan.new_tokens,
                "ringserve.cached_tokens": plan.cached_tokens,
                "ringserve.prefill_ring": plan.prefill_ring,
                "ringserve.decode_ring": plan.decode_ring,
            }
        )
        self._tracer.record(self.parent, [Stretch(name="plan", began=self._asked_at, ended=time.monotonic())])

    def completed(self, complete: inference_pb2.GenerateComplete) -> None:
        """The answer is whole."""
        self._span.note(
            {
                "gen_ai.usage.output_tokens": complete.usage.completion_tokens,
                "ringserve.time_to_first_token_seconds": complete.ttft_seconds,
            }
        )

    def ended(self, outcome: str) -> None:
        """With a finish reason, or the gRPC status of what ended it, in lower case."""
        self._span.note({"ringserve.outcome": outcome})
        self._span.end("" if outcome in FINE else outcome)
