"""Log lines: for people as before, for machines one JSON object each, whatever else is written."""

from __future__ import annotations

import io
import json
import logging
import sys

from services.telemetry.logs import JsonFormatter, JsonLines


def record(message: str, **extra: str) -> logging.LogRecord:
    made = logging.LogRecord("orchestration.router.router", logging.WARNING, "", 0, message, None, None)
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
        "logger": "orchestration.router.router",
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
