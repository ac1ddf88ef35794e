"""Declarations of commands: a function of one dataclass of options becomes a command of typer.

The fields of the dataclass are the options. A field whose type is a dataclass is a group of options that several
commands share:

    @dataclass(frozen=True, kw_only=True)
    class StatusOptions:
        ring: str = argument("name of a ring", default="")
        gateway: TargetOptions
        wide: bool = flag("show more columns")

    @command("ringserve status prefill-0")
    def status(options: StatusOptions) -> int: ...

A parsed command line is a `Call`, which nothing has run yet: tests look at its options, `main` runs it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo, ParameterInfo

from ringserve.cp_core.errors import InvalidRequest

Options = TypeVar("Options")
COLUMNS = 76
"""Width of an example, which fits a terminal of 80 columns."""
# Metavars by type, for options that name none.
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
SETTINGS = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, kw_only=True)
class Call(Generic[Options]):
    """One parsed command line."""

    name: str
    run: Callable[[Options], int]
    options: Options


@dataclass(frozen=True, kw_only=True)
class Command(Generic[Options]):
    """A command: its function, which returns the exit status, and its help but for the one-line summary."""

    run: Callable[[Options], int]
    options: type[Options]
    examples: Sequence[str]
    description: str = ""
    notes: str = ""

    def build(self, name: str, summary: str) -> TyperCommand | TyperGroup:
        """Return typer's command."""
        app = new_app()
        self.add_to(app, name, summary)
        return get_command(app)  # type: ignore[return-value]

    def add_to(self, app: typer.Typer, name: str, summary: str) -> None:
        def call(**values: Any) -> Call[Options]:
            return Call(name=name, run=self.run, options=_fill(self.options, values))

        call.__signature__ = inspect.Signature([*_parameters(self.options)])  # type: ignore[attr-defined]
        app.command(
            name,
            cls=_ExpandingCommand,
            help=self.description or _sentence(summary),
            short_help=summary,
            epilog=help_of_examples(self.examples, self.notes),
            context_settings=SETTINGS,
        )(call)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Commands under one name: `ringserve conversations list`. `verbs` are name -> (summary, command)."""

    verbs: Mapping[str, tuple[str, Command[Any]]]
    examples: Sequence[str]

    def build(self, name: str, summary: str) -> TyperCommand | TyperGroup:
        """Return typer's command."""
        app = new_app(help=_sentence(summary), epilog=help_of_examples(self.examples), callback=lambda: None)
        for verb, (words, each) in self.verbs.items():
            each.add_to(app, verb, words)
        return get_command(app)  # type: ignore[return-value]


def command(
    *examples: str, description: str = "", notes: str = ""
) -> Callable[[Callable[[Options], int]], Command[Options]]:
    """Make a command of a function of one dataclass named `options`. `notes` stand below the examples in the help."""

    def make(run: Callable[[Options], int]) -> Command[Options]:
        options = get_type_hints(run)["options"]
        return Command(run=run, options=options, examples=examples, description=description, notes=notes)

    return make


def new_app(**settings: Any) -> typer.Typer:
    """Return an empty application. Help is plain text, which pipes, NO_COLOR and narrow terminals show alike."""
    return typer.Typer(**{"add_completion": False, "rich_markup_mode": None, "context_settings": SETTINGS, **settings})


def check_text(key: str, text: str) -> str:
    """Return a text that was typed or given, if it is UTF-8. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{key}: character {error.start + 1} is no UTF-8 text; convert it to UTF-8") from None
    return text


def option(help: str, metavar: str | None = None, default: Any = MISSING, *, name: str = "", **settings: Any) -> Any:
    """Declare an option, which is named after its field; without a default it is required.

    `count: int = option("how many", default=1, min=1)` is shown as `--count N`. A metavar like "TEXT ..." stands for
    several values. `settings` are typer's.
    """
    names = [name] if name else []
    return _declare(typer.Option(*names, help=help, metavar=metavar, **settings), default)


def flag(help: str) -> Any:
    """Declare an option without a value, False unless it is given."""
    return _declare(typer.Option(help=help), False)


def hidden(default: Any) -> Any:
    """Declare an option that help does not show."""
    return _declare(typer.Option(hidden=True), default)


def argument(help: str, metavar: str | None = None, default: Any = MISSING, **settings: Any) -> Any:
    """Declare an argument. Without a default it is required."""
    return _declare(typer.Argument(help=help, metavar=metavar, **settings), default)


def one_of(help: str, allowed: Sequence[str], default: Any = MISSING) -> Any:
    """Declare an option with few values, which shell completion offers. With an empty default it may be left out."""

    def parse(text: str) -> str:
        if text and text not in allowed:
            raise ValueError(f"is not allowed; allowed are {', '.join(allowed)}")
        return text

    def complete(incomplete: str) -> list[str]:
        return [each for each in allowed if each.startswith(incomplete)]

    return option(help, "|".join(allowed), default, parser=parse, autocompletion=complete)


def _declare(info: ParameterInfo, default: Any) -> Any:
    metadata = {"typer": info}
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def help_of_examples(examples: Sequence[str], notes: str = "") -> str:
    """Return the end of a help text. Long examples continue in the next line, as a shell takes them."""
    lines = [
        " \\\n".join(textwrap.wrap(each, COLUMNS - 4, subsequent_indent="    ", break_on_hyphens=False))
        for each in examples
    ]
    return "\n".join(["\b", "Examples:", textwrap.indent("\n".join(lines), "  "), "", notes])


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each option of a dataclass, and of the groups in it."""
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):
        hint = hints[each.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _parameters(hint)
            continue
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        info: ParameterInfo | None = each.metadata.get("typer")
        if isinstance(info, OptionInfo):
            if hint is bool:  # typer would add --no-NAME
                info.param_decls = [f"--{each.name.replace('_', '-')}"]
            info.metavar = info.metavar or next(
                (METAVARS[kind] for kind in (hint, *get_args(hint)) if kind in METAVARS), None
            )
        if info is not None:
            hint = Annotated[hint, info]
        yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _fill(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the dataclass with the values of its options and its option groups."""
    hints = get_type_hints(options)
    given = {
        each.name: _fill(hints[each.name], values) if is_dataclass(hints[each.name]) else values[each.name]
        for each in fields(options)  # type: ignore[arg-type]
    }
    return options(**given)


class _ExpandingCommand(TyperCommand):
    """Command whose options may be shortened, and take several values if their metavar ends with an ellipsis.

    Click has neither, so the arguments are rewritten before it parses them: `--max-tok 3 --stop a b` becomes
    `--max-tokens 3 --stop a --stop b`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*self._expanded(args)])

    def _expanded(self, args: Sequence[str]) -> Iterator[str]:
        options = {name: each for each in self.params for name in each.opts if name.startswith("--")}
        rest = deque(args)
        while rest:
            word = rest.popleft()
            if word == "--":
                yield from (word, *rest)
                return
            name, equals, value = word.partition("=")
            longer = [each for each in options if each.startswith(name)]
            if name.startswith("--") and name not in options and len(longer) == 1:
                (name,) = longer
            found = options.get(name)
            yield name + equals + value
            if found is None or equals or getattr(found, "is_flag", False) or not rest:
                continue
            yield rest.popleft()
            if (found.metavar or "").endswith(" ..."):
                while rest and not rest[0].startswith("--"):
                    yield from (name, rest.popleft())


def refusal(error: typer.TyperException) -> str:
    """Describe a wrong command line as all errors do: key, value, allowed values."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    program = context.command_path if context is not None else "ringserve"
    name = getattr(error, "option_name", "") or ("" if parameter is None else (parameter.opts or [parameter.name])[-1])
    cause = error.__cause__
    if hasattr(error, "possibilities"):
        near = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
        said = f"{name}: there is no such option{near}"
    elif cause is not None and hasattr(cause, "errors"):
        return f"{name}: {_reason(cause.errors()[0], parameter)}"
    elif parameter is not None and not error.message:
        said = f"{parameter.metavar or name if parameter.param_type_name == 'argument' else name}: no value is given"
    elif name:
        said = f"{name}: {error.message.replace(f'Option {name!r} ', 'it ')}".removesuffix(".")
    else:
        said = f"{error.message[0].lower()}{error.message[1:]}".replace(". Did", "; did").removesuffix(".")
    return f"{said}; '{program} --help' lists what is allowed" if context is not None else said


def is_out_of_range(error: typer.TyperException) -> bool:
    """Say whether a value could be read, but is too small or too large."""
    cause = error.__cause__
    return hasattr(cause, "errors") and cause.errors()[0]["type"] in ("greater_than_equal", "less_than_equal")  # type: ignore[union-attr]


def _reason(found: Mapping[str, Any], parameter: Any) -> str:
    """Say why pydantic refused a value."""
    kind, value = found["type"], found["input"]
    if kind in ("greater_than_equal", "less_than_equal"):
        most = "or more" if parameter.max is None else f"to {parameter.max}"
        return f"{value} is out of range; allowed are {parameter.min} {most}"
    if kind == "value_error":
        return f"{value!r} {found['ctx']['error']}"
    return f"{value!r} is no {'integer' if kind.startswith('int') else 'number'}"
