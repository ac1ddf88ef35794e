"""The process that measures: in a network namespace of its own, which has the bridges of the rings and nothing else.

It reads settings from standard input and writes what it has to tell to standard output, both pickled: it is this same
program, started by `measured_in_namespaces`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from cp_core.errors import RingserveError, Unavailable
from services.offline.bench.selection.links import ShapedLinks, isolation
from services.offline.bench.selection.measure import SelectionReport, SelectionSettings, Tell, measure_selection

# Ranks that are told to end need no longer.
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Told:
    """One more is measured."""

    what: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that ended the measurement, in words."""

    why: str


def measured_in_namespaces(settings: SelectionSettings, tell: Tell) -> SelectionReport:
    """Measure in a process that has a network of its own. Raises Unavailable for whatever ends it without a report."""
    command = [*isolation(), sys.executable, "-m", "services.offline.bench.selection.hub"]
    # torch warns that addresses have no names there.
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with _ended(started) as hub:
        assert hub.stdin is not None and hub.stdout is not None
        try:
            pickle.dump(settings, hub.stdin)
            hub.stdin.close()
            while not isinstance(news := pickle.load(hub.stdout), SelectionReport):
                if isinstance(news, Failed):
                    raise Unavailable(news.why)
                tell(news.what)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise Unavailable("the process that measures ended without a word") from error
    return news


@contextmanager
def _ended(hub: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever happens, it and its ranks are gone in the end. Where it is to end early it is told, and ends them."""
    try:
        yield hub
    except BaseException:
        hub.terminate()
        raise
    finally:
        try:
            hub.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            hub.kill()
            hub.wait()
        for pipe in (hub.stdin, hub.stdout):
            if pipe is not None:
                pipe.close()


def _shaped(num_ranks: int) -> ShapedLinks:
    links = ShapedLinks(num_ranks)
    links.make_bridge()
    return links


def main() -> int:
    # Not SIGINT, which whoever started us may have left ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # What libraries print must not come between.
    out: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(news: object) -> None:
        pickle.dump(news, out)
        out.flush()

    try:
        settings = pickle.load(sys.stdin.buffer)
        report = measure_selection(settings, _shaped, lambda what: send(Told(what)))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        send(report)
    except RingserveError as error:
        send(Failed(str(error)))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        # Whoever started us does not want it any more, or is gone.
        return 1
    return 0


if __name__ == "__main__":
    # By its own name: the parent could not unpickle what is of `__main__`.
    from services.offline.bench.selection.hub import main as named_main

    raise SystemExit(named_main())
