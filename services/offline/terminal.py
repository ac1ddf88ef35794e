"""Tables and progress bars on the terminal, for commands and benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segments
from rich.table import Table

PIPE_WIDTH = 150
"""Width of a table, in characters, if the output is not a terminal."""
CELL_PADDING = 3
"""Characters that a table adds to the width of each cell: one space on either side, and one between cells."""

Tell = Callable[[str], None]
"""Callback that counts one finished measurement; the text names it."""


def simple_table(*headers: str, left_aligned: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table; columns are right-aligned but for those in `left_aligned`, and no line wraps."""
    table = Table(box=SIMPLE, title=title)
    for header in headers:
        table.add_column(header, justify="left" if header in left_aligned else "right", no_wrap=True)
    return table


def listing(*headers: str) -> Table:
    """Return an empty table of names and words, left-aligned, without a frame. The first column names the line."""
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, no_wrap=True)
    return table


def print_table(target: Console, table: Table, num_keys: int = 1) -> None:
    """Print a table no wider than the terminal, and no cell shortened.

    A table that is too wide becomes several, one below the other, each with the first `num_keys` columns again. Only
    if these and one more column are too wide, lines are longer than the terminal's.
    """
    widths = [max(map(_width, (column.header, *column.cells))) + CELL_PADDING for column in table.columns]
    keys, others = range(num_keys), range(num_keys, len(widths))
    outside = 1 if table.show_edge else -CELL_PADDING
    free = target.width - outside - sum(widths[key] for key in keys)
    parts: list[list[int]] = [[]]
    for column in others:
        if parts[-1] and sum(widths[each] for each in parts[-1]) + widths[column] > free:
            parts.append([])
        parts[-1].append(column)
    for part in parts:
        chosen = [*keys, *part]
        width = max(target.width, outside + sum(widths[column] for column in chosen))
        # Rendered first: `print` would cut the table to the terminal's width.
        segments = target.render(_columns(table, chosen), target.options.update(width=width))
        target.print(Segments(segments), end="", soft_wrap=True)


def print_lines(*lines: str) -> None:
    """Print sentences; on a terminal they wrap between words."""
    out = console()
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=not out.is_terminal)


def _width(cell: RenderableType) -> int:
    """Return the width of a cell of text, in characters."""
    return max((cell_len(line) for line in str(cell).split("\n")), default=0)


def _columns(table: Table, chosen: Sequence[int]) -> Table:
    """Return a table with some of the columns of another."""
    part = Table(title=table.title, box=table.box, show_edge=table.show_edge, pad_edge=table.pad_edge)
    for number in chosen:
        column = table.columns[number]
        part.add_column(column.header, justify=column.justify, no_wrap=True)
    for row in zip(*(list(table.columns[number].cells) for number in chosen), strict=True):
        part.add_row(*row)
    return part


def console(*, stderr: bool = False, pipe_width: int = PIPE_WIDTH) -> Console:
    """Return a console as wide as the terminal, or `pipe_width` characters wide without one."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else pipe_width, stderr=stderr)


def bar() -> Progress:
    """Return a progress bar on standard error, which vanishes at its end; standard output is the report's."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # On a terminal, standard output is redirected to above the bar; a file or pipe needs no redirection.
    redirects = sys.stdout.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=redirects)


@contextmanager
def progress_bar(total: int, description: str = "starting") -> Iterator[Tell]:
    """Show within the context how many of `total` measurements are done."""
    with bar() as progress:
        task = progress.add_task(description, total=total)
        yield lambda what: progress.update(task, advance=1, description=what)
