"""What gateways and leaders see of traces, whether or not anybody collects them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urlsplit

from cp_core.errors import ConfigError
from orchestration.protocol.tracing import Attributes, NoTracer, Stretch, Tracer
from orchestration.protocol.turns import BegunTurn
from ringserve.v1 import inference_pb2
from workers.protocol.decode_commands import FinishReason

CLOSE_SECONDS = 3.0
"""How long a process that ends waits for its last spans to be taken."""


class OpenSpan(Protocol):
    """Something that has begun. `trace_parent` is for whoever does a part of it; empty where it is not collected."""

    @property
    def trace_parent(self) -> str: ...

    def note(self, attributes: Attributes) -> None:
        """Say more about it."""

    def end(self, error: str = "") -> None:
        """It is over; `error` is why it failed."""


class ServiceTracer(Tracer, Protocol):
    """A process's door to the collector."""

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        """Begin what was begun at `began` (`time.monotonic`), as a part of a client's trace if there is one."""

    def close(self) -> None:
        """Send what is left, within CLOSE_SECONDS. May block."""


class _NoSpan:
    trace_parent = ""

    def note(self, attributes: Attributes) -> None:
        """Nobody asked."""

    def end(self, error: str = "") -> None:
        """Nobody asked."""


NO_SPAN = _NoSpan()


class NoServiceTracer(NoTracer):
    """Where no traces are collected."""

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        return NO_SPAN

    def close(self) -> None:
        """Nothing is open."""


def tracer_for(config: TracingConfig, process: str) -> ServiceTracer:
    """That of a process, e.g. "prefill-0". Raises ConfigError where the extra `otel` is needed and not installed."""
    if not config.endpoint:
        return NoServiceTracer()
    check_installed(config)
    from services.telemetry.tracing.otel import OtelTracer, exporter_to

    return OtelTracer(exporter_to(config.endpoint), process=process, sample_ratio=config.sample_ratio)


LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
"""What the extra `otel` brings."""


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """`endpoint` is a collector that takes OTLP over gRPC, as a URL: http://HOST:PORT plain, https://HOST:PORT by TLS.

    Empty: nothing is traced. `sample_ratio` of the turns are, of those whose client does not say by itself
    (`traceparent`) whether it wants to see them.
    """

    endpoint: str = ""
    sample_ratio: float = 1.0


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigError for values that cannot be meant."""
    if not 0.0 <= config.sample_ratio <= 1.0:
        raise ConfigError(f"tracing.sample_ratio: {config.sample_ratio} is out of range; allowed is 0.0 to 1.0")
    if config.endpoint and not _is_endpoint(config.endpoint):
        raise ConfigError(
            f"tracing.endpoint: {config.endpoint!r} is no collector; write http://HOST:PORT, or https:// for TLS"
        )


def check_installed(config: TracingConfig) -> None:
    """Raises ConfigError where traces are wanted and what sends them is not installed."""
    if config.endpoint and not all(map(_is_installed, LIBRARIES)):
        raise ConfigError("tracing.endpoint: traces need OpenTelemetry; install 'ringserve[otel]'")


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname and url.port) and url.path in ("", "/")
    except ValueError:  # a port that is no number
        return False


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


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
