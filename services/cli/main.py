"""The console program. Every error a user can meet is one sentence on standard error and a non-zero exit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cp_core.errors import RingserveError
from services.cli import (
    bench,
    calibrate,
    chat,
    conversations,
    demo,
    down,
    explain,
    gateway,
    generate,
    plan,
    rings,
    simulate,
    status,
    token,
    up,
)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringserve", description="Serve long-context language models on rings of ranks, exactly."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    planning = (plan, explain, simulate, calibrate)
    modules = (up, down, rings, status, generate, chat, conversations, demo, *planning, bench, gateway, token)
    for module in modules:
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except RingserveError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED
    except OSError as error:  # a full disk, a directory that is not ours: the system's own sentence says it
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
