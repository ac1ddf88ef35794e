"""Log lines: for people as before, for machines one JSON object each, whatever else is written."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.telemetry.logs import JsonFormatter, JsonLines, TurnRecord, levels_by_module, set_up_logs


def record(message: str, **extra: str) -> logging.LogRecord:
    made = logging.LogRecord("ringserve.orchestration.router.router", logging.WARNING, "", 0, message, None, None)
    vars(made).update(extra)
    return made


def test_a_line_names_its_process_its_ring_and_its_turn() -> None:
    line = JsonFormatter("prefill-0", "prefill-0").format(record("it \n began", request_id="r", turn_id="t"))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("ts").endswith("+00:00")
    assert fields == {
        "level": "warning",
        "process": "prefill-0",
        "ring": "prefill-0",
        "logger": "ringserve.orchestration.router.router",
        "message": "it \n began",
        "request_id": "r",
        "turn_id": "t",
    }


def test_what_does_not_apply_is_left_out_and_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    fields = json.loads(JsonFormatter("router").format(failed))
    assert set(fields) == {"ts", "level", "process", "logger", "message", "exception"}
    assert "ValueError: no" in fields["exception"]


def test_what_ray_forwards_comes_out_as_json_and_so_does_everything_else() -> None:
    target = io.StringIO()
    stream = JsonLines(target, "up")
    own = JsonFormatter("decode-0").format(record("steps (all of them)"))
    print(f"\x1b[36m(decode-0 leader pid=12)\x1b[0m {own}", file=stream)
    print(f"(decode-0 leader pid=12, ip=10.0.0.7) {own}", file=stream)
    print(own, file=stream)
    print("\x1b[36m(decode-0 rank 1 pid=13)\x1b[0m a library's own word", "\n\nringserve: stopping", file=stream)
    lines = [json.loads(line) for line in target.getvalue().splitlines()]
    assert lines[:3] == [json.loads(own)] * 3
    shown = [(line["process"], line["message"].strip()) for line in lines[3:]]
    assert shown == [("decode-0 rank 1 pid=13", "a library's own word"), ("up", "ringserve: stopping")]


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("trace_parent", "trace_id"),
    [(f"00-{TRACE}-b7ad6b7169203331-01", TRACE), ("", None), (f"00-{TRACE}", None), ("00-x\ny-z-01", None)],
)
def test_the_line_that_ends_a_request_has_its_figures(
    caplog: pytest.LogCaptureFixture, trace_parent: str, trace_id: str | None
) -> None:
    caplog.set_level(logging.INFO)
    turn = TurnRecord("r", "acme", trace_parent)
    turn.begun("t", 40, 30)
    turn.answered(7, 0.25)
    turn.end(logging.getLogger("gateway"), "length", 1.5)
    fields = json.loads(JsonFormatter("gateway").format(caplog.records[0]))
    known = {"outcome": "length", "tenant": "acme", "prompt_tokens": 40, "cached_tokens": 30, "completion_tokens": 7}
    known |= {"ttft_seconds": 0.25, "total_seconds": 1.5, "request_id": "r", "turn_id": "t"}
    assert known.items() <= fields.items()
    assert fields.get("trace_id") == trace_id
    assert fields["message"].startswith("request r ended: outcome length, tenant acme, ")
    assert "\n" not in fields["message"]


def test_single_modules_have_their_own_levels() -> None:
    names = ("", "ringserve.orchestration.router", "ringserve.services.gateway", "ray")
    before = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers[:]
    try:
        set_up_logs("router", "warning", levels="ringserve.orchestration.router=debug ringserve.services.gateway=error")
        found = [
            logging.getLogger(name).getEffectiveLevel()
            for name in (
                "ringserve.orchestration.router.admission",
                "ringserve.services.gateway.openai.app",
                "ringserve.orchestration.decode.leader",
            )
        ]
        assert found == [logging.DEBUG, logging.ERROR, logging.WARNING]
    finally:
        logging.getLogger().handlers[:] = handlers
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "ringserve.orchestration.router",
            "'ringserve.orchestration.router' is not allowed; give MODULE=LEVEL, with a level of debug, info",
        ),
        ("ringserve.orchestration.router=loud", "give MODULE=LEVEL"),
        ("a b=info", "'a' is not allowed"),
        (
            "ringserve.orchestration.routr=info",
            "'ringserve.orchestration.routr=info' is not allowed; there is no module ringserve.orchestration.routr",
        ),
        ("ringserve.orchestration.routr.turn=info", "there is no module ringserve.orchestration.routr.turn"),
    ],
)
def test_levels_that_would_do_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        levels_by_module(text)


def test_levels_of_libraries_are_taken() -> None:
    assert levels_by_module("uvicorn.error=warning") == {"uvicorn.error": "warning"}
    assert levels_by_module("") == {}
