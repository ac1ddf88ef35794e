"""Console program. An error ends it with one sentence on standard error and a non-zero exit status."""

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
    import_model,
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
    """Return the parser of the program and of all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="ringserve", description="Serve long-context language models on rings of ranks, exactly."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    planning = (plan, explain, simulate, calibrate)
    modules = (
        up,
        down,
        rings,
        status,
        generate,
        chat,
        conversations,
        demo,
        import_model,
        *planning,
        bench,
        gateway,
        token,
    )
    for module in modules:
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status."""
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
    except OSError as error:
        print(f"ringserve: {_sentence(options.subcommand, error)}", file=sys.stderr)
        return EXIT_FAILED


def _sentence(command: str, error: OSError) -> str:
    """Say which command failed, on which file, and why: the system's own words name none of the three together."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return f"'ringserve {command}' failed in a call of the system: {reason}"
    paths = " and ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    return f"'ringserve {command}' failed, {paths} cannot be used: {reason}"


if __name__ == "__main__":
    raise SystemExit(main())
