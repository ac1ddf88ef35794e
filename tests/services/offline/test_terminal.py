"""Tables on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from ringserve.services.offline.terminal import (
    listing,
    print_table,
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
