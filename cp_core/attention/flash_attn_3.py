"""FlashAttention 3 kernel for Hopper GPUs, from the package `fa3-fwd`: prefill about twice as fast as torch's.

"auto" chooses it if it is installed. It changes no tensor that it is given. Written against version 0.0.3, which
supports only bfloat16 and no block tables. On an H100 its LSE differs from torch's kernel by at most 3e-8.

Shapes: T query tokens, S stored tokens, H query heads, D head dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ringserve.cp_core.attention.partial import PagedShards, Partial, cumulative, empty_partial
from ringserve.cp_core.attention.torch_cuda import check_head_dim, fills_gpu
from ringserve.cp_core.attention.triton_decode import TritonDecode
from ringserve.cp_core.errors import ConfigError

HOPPER = 9
UNUSED = (None,) * 20
"""The operator's optional arguments after q, k and v: none is given."""
DEFAULTS = (-1, -1, 0, 0.0, True, None, 1, None, 0)
"""The operator's arguments after the scale and `causal`: window (2), chunk, soft cap, interleaved rotation, scheduler
metadata, number of splits, packed heads, number of processors to leave free."""


class FlashAttention3:
    """FlashAttention 3's operator, for many queries. `triton_decode` serves decode, windows, and few queries."""

    name: ClassVar[str] = "flash_attn_3"
    is_fast: ClassVar[bool] = True
    page_multiple: ClassVar[int] = TritonDecode.page_multiple
    skips_empty: ClassVar[bool] = TritonDecode.skips_empty
    takes_bounds: ClassVar[bool] = TritonDecode.takes_bounds
    fills = staticmethod(fills_gpu)

    def __init__(self, kernels: Any = None, few: TritonDecode | None = None) -> None:
        """`kernels` replaces the package's functions in tests, `few` the backend for few queries.

        Raises ConfigError if the package cannot be imported, for example because it was built for another torch.
        """
        self._kernels = kernels or _load_kernels()
        self._few = few or TritonDecode()

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return (
            TritonDecode.supports(device, dtype)
            and dtype == torch.bfloat16
            and torch.cuda.is_available()
            and torch.cuda.get_device_capability(device)[0] == HOPPER
            and importlib.util.find_spec("fa3_fwd_interface") is not None
        )

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend."""
        num_tokens, num_stored = q.shape[0], k.shape[0]
        check_head_dim(q.shape[-1])
        if not causal and not fills_gpu((num_tokens,), q.shape[1]):
            return self._few.partial_attention(q, k, v, causal=causal, scale=scale)
        assert not causal or num_tokens == num_stored, f"causal needs T == S, not {num_tokens} and {num_stored}"
        if not num_tokens or not num_stored:
            return empty_partial(q)
        # The package's function around this operator costs the host 0.15 ms; the kernel of a short prompt takes less.
        arrays = (each.unsqueeze(0) for each in (q, k, v))
        out_1thd, lse_1ht, *_ = self._kernels.fa3_fwd_cuda.fwd(*arrays, *UNUSED, scale, causal, *DEFAULTS)
        return Partial(out_1thd[0], lse_1ht[0].transpose(0, 1))

    def attend_many(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float,
    ) -> Partial:
        """See VarlenAttention."""
        check_head_dim(q.shape[-1])
        out_thd, lse_ht = self._kernels.flash_attn_varlen_func(
            q,
            k,
            v,
            cumulative(tuple(queries), q.device),
            cumulative(tuple(keys), q.device),
            max(queries),
            max(keys),
            softmax_scale=scale,
            causal=causal,
            return_attn_probs=True,
        )
        return Partial(out_thd, lse_ht.transpose(0, 1))

    def attend_between(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: torch.Tensor,
        stop: torch.Tensor,
        *,
        scale: float,
    ) -> Partial:
        """See BandAttention."""
        return self._few.attend_between(q, k, v, first, stop, scale=scale)

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """See PagedBackend."""
        return self._few.paged_attention(q, shards, scale=scale)


def _load_kernels() -> Any:
    try:
        return importlib.import_module("fa3_fwd_interface")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"attention_backend is 'flash_attn_3', but package fa3-fwd cannot be imported ({error}); "
            "install another version of it, or name 'triton_decode'"
        ) from error
