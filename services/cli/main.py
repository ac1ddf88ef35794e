"""Console program. An error ends it with one sentence on standard error and a non-zero exit status."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from ringserve.cp_core.errors import RingserveError
from ringserve.services.cli import (
    bench,
    calibrate,
    chat,
    config,
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
from ringserve.services.cli.options import check_text
from ringserve.services.telemetry.metrics.registry import package_version

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Parser that refuses a command line in one sentence, and names an unknown option before a missing one."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            for argument in given[: given.index("--")] if "--" in given else given:
                self._check_known(argument.partition("=")[0])
        return super().parse_known_args(given, namespace)

    def _check_known(self, name: str) -> None:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            near = difflib.get_close_matches(name, known, n=1)
            self.error(f"{name}: there is no such option{f'; did you mean {near[0]}?' if near else ''}")

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"ringserve: {message}; '{self.prog} --help' lists what is allowed\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the program and of all its subcommands."""
    parser = Parser(prog="ringserve", description="Serve long-context language models on rings of ranks, exactly.")
    parser.add_argument("--version", action="version", version=f"ringserve {package_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="subcommand")
    planning = (plan, explain, simulate, calibrate)
    modules = (
        up,
        down,
        config,
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
    parser = build_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help()
        return 0
    try:
        for argument in given:
            check_text(f"argument {given.index(argument) + 1}", argument)
        options = parser.parse_args(given)
        if options.subcommand is None:
            parser.error("no command is given")
        return _run(options)
    except RingserveError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
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
