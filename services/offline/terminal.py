"""Tables and progress bars on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_WIDTH = 150
"""Columns of a table where the output is no terminal."""

Tell = Callable[[str], None]
"""Callback that counts one finished measurement; the text names it."""


def simple_table(*headers: str, left_aligned: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table; columns are right-aligned but for those in `left_aligned`, and no line wraps."""
    table = Table(box=SIMPLE, title=title)
    for header in headers:
        table.add_column(header, justify="left" if header in left_aligned else "right", no_wrap=True)
    return table


def console(*, stderr: bool = False, pipe_width: int = PIPE_WIDTH) -> Console:
    """Return a console as wide as the terminal, or `pipe_width` columns wide without one."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else pipe_width, stderr=stderr)


def bar() -> Progress:
    """Return a progress bar on standard error, which vanishes at its end; standard output is the report's."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def progress_bar(total: int, description: str = "starting") -> Iterator[Tell]:
    """Show within the context how many of `total` measurements are done."""
    with bar() as progress:
        task = progress.add_task(description, total=total)
        yield lambda what: progress.update(task, advance=1, description=what)
