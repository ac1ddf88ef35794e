"""Kernels of CPUs against the fp64 oracle, and the choice between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention import native
from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.attention.native import MAX_SINGLE_TOKENS, NativeCpu
from ringserve.cp_core.attention.partial import AttentionBackend, attends_newest
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import MAX_FOLDED_TOKENS, TorchCpuFlash
from ringserve.cp_core.errors import ConfigError
from tests.oracles import largest, oracle_partial, random_tokens

# Without a compiler ringserve is installed without its own kernels.
CPU_KERNELS: list[AttentionBackend] = [TorchCpuFlash(), *([NativeCpu()] if native.library() else [])]
BACKENDS: list[AttentionBackend] = [ReferenceAttention(), *CPU_KERNELS]
LSE_TOLERANCE = 2e-6


def _names(backend: AttentionBackend) -> str:
    return backend.name


def _check(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
    """Out within 2e-6 of max |v| (err1 of these sizes), lse within 2e-6 * max(1, |lse|)."""
    scale = q.shape[-1] ** -0.5
    part = backend.partial_attention(q, k, v, causal=causal, scale=scale)
    right = oracle_partial(q, k, v, causal=causal, scale=scale)
    assert part.out.dtype == part.lse.dtype == torch.float32
    assert part.out.shape == q.shape
    assert part.lse.shape == q.shape[:2]
    assert largest(part.out.double() - right.out) <= 2e-6 * max(1.0, largest(v))
    assert largest((part.lse.double() - right.lse) / right.lse.abs().clamp(min=1.0)) <= LSE_TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS, ids=_names)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (8, 1), (16, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_shape_matches_the_oracle(
    backend: AttentionBackend, head_dim: int, num_heads: int, num_kv_heads: int, causal: bool
) -> None:
    tokens = random_tokens(65, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    num_queries = 65 if causal else 33
    _check(backend, tokens.q[:num_queries], tokens.k, tokens.v, causal=causal)


@pytest.mark.parametrize("backend", BACKENDS, ids=_names)
@pytest.mark.parametrize(
    "num_tokens",
    [
        1,
        2,
        MAX_SINGLE_TOKENS,
        MAX_SINGLE_TOKENS + 1,
        63,
        64,
        65,
        255,
        256,
        257,
        MAX_FOLDED_TOKENS,
        MAX_FOLDED_TOKENS + 1,
    ],
)
def test_lengths_around_the_kernels_blocks_match_the_oracle(backend: AttentionBackend, num_tokens: int) -> None:
    tokens = random_tokens(num_tokens)
    _check(backend, tokens.q, tokens.k, tokens.v, causal=True)
    _check(backend, tokens.q, tokens.k[:65], tokens.v[:65], causal=False)
    _check(backend, tokens.q[:3], tokens.k, tokens.v, causal=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS, ids=_names)
@pytest.mark.parametrize("causal", [False, True])
def test_narrow_inputs_give_fp32_partials(backend: AttentionBackend, dtype: torch.dtype, causal: bool) -> None:
    """Rounded to the dtype, at most 1.05 of its rounding floor; before rounding as exact as fp32."""
    tokens = random_tokens(130, dtype=dtype)
    _check(backend, tokens.q, tokens.k, tokens.v, causal=causal)
    part = backend.partial_attention(tokens.q, tokens.k, tokens.v, causal=causal, scale=0.125)
    right = oracle_partial(tokens.q, tokens.k, tokens.v, causal=causal, scale=0.125)
    floor = largest(right.out.to(dtype).double() - right.out)
    assert largest(part.out.to(dtype).double() - right.out) <= 1.05 * floor


@pytest.mark.parametrize("backend", BACKENDS, ids=_names)
@pytest.mark.parametrize(("num_tokens", "num_stored"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_attend_is_the_empty_part(backend: AttentionBackend, num_tokens: int, num_stored: int) -> None:
    tokens = random_tokens(5)
    part = backend.partial_attention(
        tokens.q[:num_tokens], tokens.k[:num_stored], tokens.v[:num_stored], causal=False, scale=0.125
    )
    assert torch.equal(part.out, torch.zeros(num_tokens, 4, 64))
    assert torch.equal(part.lse, torch.full((num_tokens, 4), -torch.inf))


@pytest.mark.parametrize("backend", CPU_KERNELS, ids=_names)
@pytest.mark.parametrize("num_queries", [3, 600])
def test_strided_views_of_a_cache_give_the_numbers_of_copies(backend: AttentionBackend, num_queries: int) -> None:
    tokens = random_tokens(700)
    cache = torch.stack([tokens.k, tokens.v], dim=1)
    queries = torch.stack([tokens.q, tokens.q], dim=2)[:num_queries, :, 0]
    of_views = backend.partial_attention(queries, cache[:, 0], cache[:, 1], causal=False, scale=0.125)
    of_copies = backend.partial_attention(tokens.q[:num_queries], tokens.k, tokens.v, causal=False, scale=0.125)
    torch.testing.assert_close(of_views.out, of_copies.out, atol=2e-6, rtol=0)
    torch.testing.assert_close(of_views.lse, of_copies.lse, atol=2e-6, rtol=0)


@given(
    num_tokens=st.integers(1, 40),
    num_stored=st.integers(1, 90),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_queries_over_any_keys_match_the_oracle(
    num_tokens: int, num_stored: int, heads: tuple[int, int], magnitude: float, seed: int
) -> None:
    tokens = random_tokens(max(num_tokens, num_stored), num_heads=heads[0], num_kv_heads=heads[1], seed=seed)
    q, k, v = tokens.q[:num_tokens] * magnitude, tokens.k[:num_stored], tokens.v[:num_stored]
    right = oracle_partial(q, k, v, causal=False, scale=0.125)
    plain = ReferenceAttention().partial_attention(q, k, v, causal=False, scale=0.125)
    error = largest(plain.out.double() - right.out)
    for backend in CPU_KERNELS:
        part = backend.partial_attention(q, k, v, causal=False, scale=0.125)
        assert largest(part.out.double() - right.out) <= 2 * error + 2e-6 * magnitude + 1e-6


def test_a_causal_call_that_is_not_square_is_refused() -> None:
    tokens = random_tokens(5)
    for backend in BACKENDS:
        with pytest.raises(AssertionError, match="causal needs T == S, not 3 and 5"):
            backend.partial_attention(tokens.q[:3], tokens.k, tokens.v, causal=True, scale=0.125)


def test_backends_are_chosen_by_name_and_auto_takes_the_fast_one() -> None:
    assert select_backend("auto", "cpu", torch.float32).name == CPU_KERNELS[-1].name
    assert select_backend("auto", "cpu", torch.float16).name == "torch_cpu_flash"
    assert select_backend("reference", "cpu", torch.float32).name == "reference"
    assert select_backend("torch_cpu_flash", "cpu", torch.bfloat16).name == "torch_cpu_flash"


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match="allowed are auto, native_cpu, torch_cpu_flash, flash_attn_3, triton_decode, torch_cuda_flash, ",
    ):
        select_backend("flash_9", "cpu", torch.float32)


def test_a_backend_that_does_not_serve_the_device_is_refused_and_nothing_falls_back() -> None:
    with pytest.raises(ConfigError, match=r"does not support torch\.float32 on cuda:0"):
        select_backend("torch_cpu_flash", "cuda:0", torch.float32)
    with pytest.raises(ConfigError, match="no fast kernel supports"):
        select_backend("auto", "cuda:0", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize(("num_tokens", "num_stored"), [(1, 1), (3, 3), (5, 40), (9, 700)])
def test_newest_tokens_see_all_keys_up_to_themselves(
    num_tokens: int, num_stored: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    tokens = random_tokens(num_stored, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, seed=num_stored)
    q = tokens.q[num_stored - num_tokens :]
    for backend in CPU_KERNELS:
        assert attends_newest(backend)
        part = backend.attend_newest(q, tokens.k, tokens.v, scale=0.125)
        for place in range(num_tokens):
            seen = num_stored - num_tokens + place + 1
            right = oracle_partial(q[place : place + 1], tokens.k[:seen], tokens.v[:seen], causal=False, scale=0.125)
            assert largest(part.out[place : place + 1].double() - right.out) <= 1e-5
            assert largest(part.lse[place : place + 1].double() - right.lse) <= 1e-5


def test_without_a_compiled_library_cpus_are_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no compiler was found at installation, and where the library is of another version of its functions."""
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert select_backend("auto", "cpu", torch.float32).name == "torch_cpu_flash"
    with pytest.raises(ConfigError, match="'native_cpu' does not support"):
        select_backend("native_cpu", "cpu", torch.float32)
