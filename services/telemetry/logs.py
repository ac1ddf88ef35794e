"""Logs of every process, to standard error: one line for each event, for people or as JSON for machines."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
from datetime import UTC, datetime
from typing import TextIO

from ringserve.cp_core.errors import ConfigError

LOG_FORMATS = ("human", "json")
TURN_KEYS = ("request_id", "turn_id")
"""Keys that a line about one turn carries as `extra`, so that the turn can be followed through all processes."""


LOG_LEVELS = ("debug", "info", "warning", "error")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def levels_by_module(text: str) -> dict[str, str]:
    """Read levels of modules and all below them: "MODULE=LEVEL ...".

    Raises ConfigError, whose text does not name the configuration key: the caller adds it.
    """
    levels = {}
    for word in text.split():
        module, _, level = word.partition("=")
        if level not in LOG_LEVELS or not MODULE.fullmatch(module):
            raise ConfigError(f"{word!r} is not allowed; give MODULE=LEVEL, with a level of {', '.join(LOG_LEVELS)}")
        if module.partition(".")[0] == "ringserve" and not _exists(module):
            raise ConfigError(f"{word!r} is not allowed; there is no module {module}")
        levels[module] = level
    return levels


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False


def set_up_logs(process: str, level: str = "info", form: str = "human", levels: str = "", ring: str = "") -> None:
    """Set up the logs of a process, which every line names. Lines below `level` are dropped.

    `levels` gives some modules other levels, in the form that `levels_by_module` reads. It must be valid: check it
    first.

    This replaces an earlier set-up. `form` is one of LOG_FORMATS. JSON lines have ts (UTC), level, process, logger and
    message, and if they apply ring, request_id, turn_id, exception and the figures of `TurnRecord`.
    """
    handler = logging.StreamHandler()
    line = f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter(process, ring) if form == "json" else logging.Formatter(line))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("ray").setLevel(logging.WARNING)
    for module, own in levels_by_module(levels).items():
        logging.getLogger(module).setLevel(own.upper())


class JsonFormatter(logging.Formatter):
    """Formatter of a record as one JSON object, in one line."""

    def __init__(self, process: str, ring: str = "") -> None:
        super().__init__()
        self._process = process
        self._ring = ring

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._ring:
            fields["ring"] = self._ring
        for key in TURN_KEYS:
            if value := getattr(record, key, ""):
                fields[key] = str(value)
        fields |= getattr(record, "figures", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
"""W3C trace context, level 1: version, trace, span, flags."""


class TurnRecord:
    """Request figures, for the one line that says how it ended. They grow while it runs."""

    def __init__(self, request_id: str, tenant: str, trace_parent: str) -> None:
        """`trace_parent` is the client's or our own; a malformed one is left out."""
        self._request_id = request_id
        self._turn_id = ""
        self._figures: dict[str, str | int | float] = {}
        if tenant:
            self._figures["tenant"] = tenant
        if match := TRACE_PARENT.fullmatch(trace_parent):
            self._figures["trace_id"] = match.group(1)

    def begun(self, turn_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        self._turn_id = turn_id
        self._figures |= {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "completion_tokens": 0}

    def answered(self, completion_tokens: int, ttft_seconds: float) -> None:
        self._figures["completion_tokens"] = completion_tokens
        if completion_tokens:
            self._figures["ttft_seconds"] = round(ttft_seconds, 6)

    def end(self, log: logging.Logger, outcome: str, seconds: float) -> None:
        """Write the line. `outcome` is a finish reason, or a gRPC status in lower case."""
        figures = {"outcome": outcome, **self._figures, "total_seconds": round(seconds, 6)}
        shown = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        extra = {"request_id": self._request_id, "turn_id": self._turn_id, "figures": figures}
        log.info("request %s ended: %s", self._request_id or "(refused)", shown, extra=extra)


RAY_PREFIX = re.compile(r"^(?:\x1b\[\d+m)?\((?P<who>[^()]*\bpid=\d+[^()]*)\)(?:\x1b\[0m)? ?(?P<line>.*)$")


class JsonLines:
    """Text stream that passes on lines that are JSON objects, and turns each remaining line into one.

    Ray prefixes each line that its processes write, which would make JSON unreadable.
    """

    def __init__(self, target: TextIO, process: str) -> None:
        self._target = target
        self._process = process
        self._begun = threading.local()  # `print` writes a line in two pieces, and several threads print

    def write(self, text: str) -> int:
        *lines, self._begun.line = (getattr(self._begun, "line", "") + text).split("\n")
        for line in lines:
            if line.strip():
                self._target.write(self._as_json(line) + "\n")
        return len(text)

    def _as_json(self, line: str) -> str:
        match = RAY_PREFIX.match(line)
        process, message = (match["who"], match["line"]) if match else (self._process, line)
        if message.startswith("{") and message.endswith("}"):
            return message
        record = logging.LogRecord("output", logging.INFO, "", 0, message.rstrip("\r"), None, None)
        return JsonFormatter(process).format(record)

    def flush(self) -> None:
        self._target.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._target.fileno()
