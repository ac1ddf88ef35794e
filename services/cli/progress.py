"""The bar of commands that measure: on standard error, since standard output is the report's, and gone at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
