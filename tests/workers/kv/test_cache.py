"""The KV cache of a rank against a plain list of tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringserve.workers.kv.cache import MAX_COPIES, KvCache, SlotRun, runs

BLOCK_TOKENS = 4


def small_cache(*, num_blocks: int = 64, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(
        num_layers=2,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        num_kv_heads=2,
        head_dim=3,
        dtype=dtype,
        poisoned=True,
    )


def numbered(num_tokens: int, *, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Make K and V whose every value names its token."""
    k = torch.arange(first, first + num_tokens, dtype=torch.float32).reshape(-1, 1, 1).expand(-1, 2, 3).contiguous()
    return k, -k - 1


block_tables = st.permutations(range(64)).map(lambda blocks: tuple(blocks[:40]))


@given(block_tables, st.integers(0, 100), st.integers(0, 60))
def test_runs_are_the_slots_of_the_stored_tokens_in_order(blocks: tuple[int, ...], first: int, count: int) -> None:
    found = runs(blocks, count, BLOCK_TOKENS, first=first)
    slots = [slot for run in found for slot in range(run.start, run.stop)]
    wanted = [blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS for i in range(first, first + count)]
    assert slots == wanted


@given(block_tables, st.integers(1, 160))
def test_runs_are_maximal(blocks: tuple[int, ...], count: int) -> None:
    found = runs(blocks, count, BLOCK_TOKENS)
    assert all(before.stop != after.start for before, after in pairwise(found))


def test_adjacent_blocks_are_one_run() -> None:
    assert runs((5, 6, 7, 2), 14, BLOCK_TOKENS) == (SlotRun(20, 32), SlotRun(8, 10))
    assert runs((5, 6, 7, 2), 0, BLOCK_TOKENS) == ()
    assert runs((5, 6, 7, 2), 3, BLOCK_TOKENS, first=6) == (SlotRun(26, 29),)


def test_more_tokens_than_the_blocks_hold_is_a_bug_and_says_so() -> None:
    with pytest.raises(AssertionError, match="2 blocks of 4 do not hold 9 tokens"):
        runs((1, 2), 9, BLOCK_TOKENS)


@given(block_tables, st.lists(st.integers(0, 50), max_size=5))
def test_what_is_written_in_steps_is_read_back_whole(blocks: tuple[int, ...], steps: list[int]) -> None:
    cache, held = small_cache(), 0
    for count in steps:
        count = min(count, len(blocks) * BLOCK_TOKENS - held)
        k, v = numbered(count, first=held)
        cache.write(1, blocks, held, k, v)
        held += count
    k, v = numbered(held)
    got = cache.read(1, blocks, 0, held)
    assert torch.equal(got.k, k)
    assert torch.equal(got.v, v)
    views = cache.views(1, cache.runs(blocks, held))
    assert torch.equal(torch.cat([k[:0], *(view.k for view in views)]), k)
    assert torch.equal(torch.cat([v[:0], *(view.v for view in views)]), v)


def test_a_table_of_scattered_blocks_is_written_and_read_through_an_index() -> None:
    cache, blocks = small_cache(), tuple(range(0, 64, 2))
    assert len(cache.runs(blocks, 128)) > MAX_COPIES
    k, v = numbered(128)
    cache.write(0, blocks, 0, k, v)
    got = cache.read(0, blocks, 0, 128)
    assert torch.equal(got.k, k)
    assert torch.equal(got.v, v)


def test_short_runs_are_attended_as_copies_in_stored_order_and_long_ones_as_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringserve.workers.kv.cache.COPIED_BYTES", 5 * 2 * 2 * 3 * 4)  # of 5 tokens
    monkeypatch.setattr("ringserve.workers.kv.cache.MAX_COPIED_TOKENS", 7)
    cache, blocks = small_cache(), (9, 2, 40, 30, 31, 32, 5, 60)
    k, v = numbered(30)
    cache.write(1, blocks, 0, k, v)
    got = cache.gathered(1, cache.pieces(cache.runs(blocks, 30)))
    assert [len(run.k) for run in got] == [7, 5, 12, 6]
    assert torch.equal(torch.cat([run.k for run in got]), k)
    assert torch.equal(torch.cat([run.v for run in got]), v)
    assert got[2].k.data_ptr() == cache.k_layers[1][120:].data_ptr()
    assert cache.gathered(1, cache.pieces(())) == []


def test_views_share_memory_with_the_cache() -> None:
    cache = small_cache()
    (view,) = cache.views(0, cache.runs((3, 4), 8))
    k, v = numbered(8)
    cache.write(0, (3, 4), 0, k, v)
    assert torch.equal(view.k, k)
    assert view.k.data_ptr() == cache.k_layers[0][12:].data_ptr()


def test_a_write_touches_only_its_own_slots_of_its_own_layer() -> None:
    cache = small_cache(num_blocks=8)
    cache.write(1, (6, 2), 3, *numbered(2))
    written = {27, 8}
    for slot in range(32):
        assert bool(cache.k_layers[1][slot].isnan().all()) == (slot not in written)
        assert bool(cache.v_layers[1][slot].isnan().all()) == (slot not in written)
    assert cache.k_layers[0].isnan().all()
    assert cache.v_layers[0].isnan().all()


def test_decoded_tokens_of_a_batch_are_stored_in_one_call() -> None:
    cache = small_cache()
    k, v = numbered(3)
    cache.write_slots(0, torch.tensor([9, 0, 33]), k, v)
    assert torch.equal(cache.k_layers[0][[9, 0, 33]], k)
    assert torch.equal(cache.v_layers[0][[9, 0, 33]], v)


def test_rows_of_padding_are_stored_behind_all_blocks() -> None:
    cache = small_cache(num_blocks=8)
    k, v = numbered(4)
    cache.write_slots(0, torch.tensor([cache.spare_slot, 31, cache.spare_slot, cache.spare_slot]), k, v)
    pages, _ = cache.pages(0)
    assert pages.shape == (8, BLOCK_TOKENS, 2, 3)
    assert torch.equal(pages[7, 3], k[1])
    assert pages.flatten(0, 1)[:31].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_stored_bit_for_bit(dtype: torch.dtype) -> None:
    cache = small_cache(dtype=dtype)
    k = torch.randn(10, 2, 3).to(dtype)
    cache.write(0, (1, 5, 3), 0, k, -k)
    got = cache.read(0, (1, 5, 3), 0, 10)
    assert torch.equal(got.k, k)
    assert torch.equal(got.v, -k)


def test_tensor_parallel_heads_are_written_and_read_apart() -> None:
    cache = small_cache()
    k, v = numbered(30)
    for blocks in (tuple(range(8)), tuple(range(0, 64, 2))):
        cache.write_runs(0, cache.runs(blocks, 30), k[:, :1], v[:, :1], heads=slice(1, 2))
        assert cache.read(0, blocks, 0, 30).k[:, 0].isnan().all()
        assert torch.equal(cache.read_runs(0, cache.runs(blocks, 30), heads=slice(1, 2)).v, v[:, :1])
        cache = small_cache()


def test_random_filling_writes_every_slot_the_same_for_the_same_seed_only() -> None:
    first, again, other = small_cache(), small_cache(), small_cache()
    for cache, seed in ((first, 1), (again, 1), (other, 2)):
        cache.fill_random(seed)
    for layer in range(2):
        assert first.k_layers[layer].isfinite().all()
        assert first.v_layers[layer].isfinite().all()
        assert torch.equal(first.v_layers[layer], again.v_layers[layer])
        assert not torch.equal(first.v_layers[layer], other.v_layers[layer])


def test_a_cache_far_larger_than_memory_in_use_costs_only_what_is_written() -> None:
    cache = KvCache(num_layers=4, num_blocks=65536, block_tokens=16, num_kv_heads=8, head_dim=64)
    k = torch.ones(16, 8, 64)
    cache.write(3, (65535,), 0, k, k)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    # The cache reserves 16 GiB; the process with torch stays far below that.
    assert resident_kib < 4 * 1024 * 1024


def test_a_copied_block_is_the_same_in_every_layer_and_nothing_else_changes() -> None:
    cache = small_cache(num_blocks=6)
    cache.fill_random(3)
    before = [tensor.clone() for tensor in (*cache.k_layers, *cache.v_layers)]
    cache.copy_block(4, 1)
    size = cache.block_tokens
    for was, now in zip(before, (*cache.k_layers, *cache.v_layers), strict=True):
        was[size : 2 * size] = was[4 * size : 5 * size]
        assert torch.equal(was, now)
