"""Console program. An error ends it with one sentence on standard error and a non-zero exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ringserve.cp_core.errors import RingserveError
from ringserve.services.cli.command import Call, Command, Group, check_text, is_out_of_range, new_app, refusal

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
PLACES = {
    "up": ("up", "start a cluster on this machine, or the rings on a Ray cluster"),
    "serve": ("up", "start a cluster that serves a model: 'up' with its directory"),
    "down": ("up", "stop a local cluster"),
    "config": ("config", "print all keys of the configuration with their values"),
    "drain": ("rings", "take a ring out of service without losing a turn"),
    "undrain": ("rings", "bring a ring back that drains or has drained"),
    "restart": ("rings", "start rings again without losing a turn"),
    "status": ("status", "show rings and KV"),
    "generate": ("generate", "run one turn"),
    "chat": ("chat", "talk on the terminal"),
    "conversations": ("conversations", "list, show, fork and delete conversations"),
    "demo": ("demo", "ask a model about a document and check every token"),
    "check": ("check", "read a model directory and say how it would be served"),
    "import": ("import_model", "make a model directory of a GGUF file"),
    "plan": ("plan", "size a cluster by prediction"),
    "explain": ("explain", "explain how a turn would be computed"),
    "simulate": ("simulate", "run a trace over many rings, in simulated time"),
    "calibrate": ("calibrate", "measure serving rings, and fit a profile to plan by"),
    "bench": ("bench", "time to first token and between tokens of a whole service under load"),
    "gateway": ("gateway", "run one more gateway"),
    "token": ("token", "make a bearer token"),
}
"""Command -> the module in this folder that has it as an attribute of that name, and a summary."""


class _Commands(TyperGroup):
    """Group that imports a command's module when that command is called: to list or complete names needs no module."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:
            return name, listed, rest
        place, summary = PLACES[name]
        module = import_module(f"ringserve.services.cli.{place}")
        found: Command[Any] | Group = getattr(module, "import_" if name == "import" else name)
        return name, found.build(name, summary), rest


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from ringserve.services.telemetry.metrics.registry import package_version

        print(f"ringserve {package_version()}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve long-context language models on rings of ranks, exactly."""


def parse(arguments: Sequence[str]) -> Call[Any]:
    """Parse a command line without running it, e.g. `["status", "--json"]`.

    Raises TyperException for a wrong command line, SystemExit if it asks for help, version or completion.
    """
    epilog = "'ringserve COMMAND --help' shows the options of a command, and examples."
    app = new_app(cls=_Commands, callback=_program, epilog=epilog, add_completion=True)
    for name, (_, summary) in PLACES.items():
        app.command(name, short_help=summary)(lambda: None)
    found: Call[Any] | int = get_command(app).main([*arguments], prog_name="ringserve", standalone_mode=False)
    if isinstance(found, int):
        raise SystemExit(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = ""
    try:
        for place, argument in enumerate(given, 1):
            check_text(f"argument {place}", argument)
        call = parse(given or ["--help"])
        name = call.name
        return call.run(call.options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.TyperException as error:
        print(f"ringserve: {refusal(error)}", file=sys.stderr)
        return EXIT_FAILED if is_out_of_range(error) else EXIT_USAGE
    except RingserveError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of standard output is gone. Python would report it once more at its end.
        with suppress(OSError):  # in tests standard output has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        print(f"ringserve: {_sentence(name, error)}", file=sys.stderr)
        return EXIT_FAILED


def _sentence(command: str, error: OSError) -> str:
    """Say which command failed, on which file, and why: the system's own message never names all three."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return f"'ringserve {command}' failed in a call of the system: {reason}"
    paths = " and ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    return f"'ringserve {command}' failed, {paths} cannot be used: {reason}"


if __name__ == "__main__":
    raise SystemExit(main())
