"""Tables for the terminal, as all commands that compare draw them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_WIDTH = 150
"""Columns where the output is no terminal."""


def simple_table(*headers: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """Numbers stand at the right, columns in `left` at the left; no line is broken."""
    table = Table(box=SIMPLE, title=title)
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    return table


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or wide enough for our tables."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else PIPE_WIDTH, stderr=stderr)


Tell = Callable[[str], None]
"""One more is done; the text says what."""


@contextmanager
def progress_bar(total: int, description: str = "starting") -> Iterator[Tell]:
    """While the context lasts, how many of `total` are done."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task(description, total=total)
        yield lambda what: progress.update(task, advance=1, description=what)
