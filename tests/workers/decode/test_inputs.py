"""Buffers of a decode step's inputs: what a step reads on the device is what the host gave, whatever came before."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.workers.decode.graphs import LEAST_ROWS, LEAST_WIDTH, InputBuffers, StepInputs
from tests.workers.decode.lazy_device import LazyBuffers, LazyStream

CPU = torch.device("cpu")


def table_of(inputs: StepInputs, blocks: list[list[int]]) -> list[list[int]]:
    return [inputs.table[row, : len(each)].tolist() for row, each in enumerate(blocks)]


@given(
    is_staged=st.booleans(),
    steps=st.lists(
        st.tuples(st.integers(0, LEAST_ROWS + 4), st.integers(0, 40), st.booleans()), min_size=1, max_size=6
    ),
)
@settings(max_examples=60, deadline=None)
def test_any_row_of_steps_reads_what_each_of_them_gave(is_staged: bool, steps: list[tuple[int, int, bool]]) -> None:
    """Batches grow and shrink, tables grow in place or change their sequence, and buffers are made anew in between."""
    buffers = InputBuffers(CPU, 2, is_staged=is_staged)
    tables: list[list[int]] = []
    for number, (batch, width, is_other) in enumerate(steps):
        if is_other:
            tables = []
        tables = (tables + [[] for _ in range(batch)])[:batch]
        for row, table in enumerate(tables):
            table += [number * 1000 + row * 50 + each for each in range(len(table), max(width - row, 0))]
        lengths = [3 * len(table) for table in tables]
        ids, slots = [7 + number + row for row in range(batch)], [11 * row for row in range(batch // 2)]
        firsts = [[length // 2 for length in lengths], [length // 3 for length in lengths]]
        inputs = buffers.fill(
            ids, [100 + each for each in ids], slots, list(range(len(slots))), tables, lengths, firsts=firsts
        )
        assert [each.tolist() for each in inputs.firsts] == firsts
        assert inputs.token_ids.tolist() == ids
        assert inputs.positions.tolist() == [100 + each for each in ids]
        assert inputs.slots.tolist() == slots
        assert inputs.stored.tolist() == list(range(len(slots)))
        assert inputs.lengths.tolist() == lengths
        assert inputs.table.shape[0] == batch
        assert table_of(inputs, tables) == tables
        assert (inputs.lengths.dtype, inputs.table.dtype, inputs.slots.dtype) == (torch.int32, torch.int32, torch.int64)


def test_addresses_stay_while_the_batch_fits_so_that_a_captured_graph_may_read_them() -> None:
    buffers = InputBuffers(CPU, is_staged=True)
    first = buffers.fill([1], [2], [3], [0], [[4]], [1])
    table = list(range(LEAST_WIDTH))
    second = buffers.fill([5] * LEAST_ROWS, [6] * LEAST_ROWS, [], [], [table] * LEAST_ROWS, [9] * LEAST_ROWS)
    assert [each.data_ptr() for each in (first.token_ids, first.positions, first.lengths, first.table)] == [
        each.data_ptr() for each in (second.token_ids, second.positions, second.lengths, second.table)
    ]
    third = buffers.fill([1] * (LEAST_ROWS + 1), [2] * (LEAST_ROWS + 1), [], [])
    assert third.token_ids.tolist() == [1] * (LEAST_ROWS + 1)


def test_what_the_device_has_yet_to_copy_is_not_overwritten() -> None:
    """Five steps are written; the last has the memory of the third, whose copy comes after two steps."""
    stream, read = LazyStream(), list[tuple[int, int]]()
    buffers = LazyBuffers(CPU, 0, stream)

    def look_at(inputs: StepInputs) -> None:
        read.append((int(inputs.token_ids[0]), int(inputs.table[0, 0])))

    for number in range(5):
        inputs = buffers.fill([number], [number], [number], [0], [[number]], [number])
        stream.launch(partial(look_at, inputs))
    assert read == [(0, 0), (1, 1)]
    stream.launch(lambda: None).synchronize()
    assert read == [(number, number) for number in range(5)]


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_sequence_that_returns_with_as_many_other_blocks_gets_its_own_table(is_staged: bool) -> None:
    buffers = InputBuffers(CPU, is_staged=is_staged)
    buffers.fill([1], [1], [], [], [[4, 5]], [2])
    assert buffers.fill([1], [1], [], [], [[6, 7]], [2]).table[0, :2].tolist() == [6, 7]
