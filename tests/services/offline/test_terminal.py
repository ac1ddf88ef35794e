"""Tables on terminals of any width."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console
from rich.table import Table

from ringserve.services.offline.terminal import (
    LINES,
    interrupted_by_sigterm,
    listing,
    print_table,
    progress_lines,
    simple_table,
)


def printed(table: Table, width: int, num_keys: int = 1) -> list[str]:
    file = io.StringIO()
    print_table(Console(file=file, width=width), table, num_keys)
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def filled(table: Table) -> Table:
    for name in ("first", "second"):
        table.add_row(name, *(f"{column}-{name}" for column in range(6)))
    return table


HEADERS = ("name", *(f"column {number}" for number in range(6)))


@pytest.mark.parametrize("width", [40, 41, 60, 80, 100, 200])
@pytest.mark.parametrize("make", [listing, simple_table])
def test_no_line_is_longer_than_the_terminal_and_every_cell_is_whole(width: int, make: type[Table]) -> None:
    lines = printed(filled(make(*HEADERS)), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for column in range(6):
        for name in ("first", "second"):
            assert text.count(f"{column}-{name}") == 1


def test_each_part_repeats_the_columns_that_name_a_line() -> None:
    lines = printed(filled(listing(*HEADERS)), 60, num_keys=2)
    headers = [line.split("column")[0:2] for line in lines if line.startswith("name")]
    assert len(headers) > 1
    assert all(line.startswith("name     column 0") for line in lines if line.startswith("name"))


def test_a_name_longer_than_the_terminal_is_still_whole() -> None:
    table = listing("name", "state")
    table.add_row("x" * 50, "ready")
    text = "\n".join(printed(table, 40))
    assert "x" * 50 in text
    assert "ready" in text


def test_a_table_of_one_column_is_printed() -> None:
    table = listing("name")
    table.add_row("x")
    assert printed(table, 40)[-1] == "x"


@pytest.mark.parametrize(("total", "num_lines"), [(1, 1), (7, 7), (LINES, LINES), (997, LINES)])
def test_progress_without_a_terminal_is_some_lines_of_which_the_last_says_all(
    total: int, num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_lines(total) as tell:
        for number in range(total):
            tell(f"measurement {number}")
    written = capsys.readouterr().err.splitlines()
    assert len(written) == num_lines
    assert written[-1] == f"{total} of {total}: measurement {total - 1}"


def test_sigterm_interrupts_inside_the_context_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
