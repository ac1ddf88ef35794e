"""Torch's flash attention kernel for CPUs, the only torch CPU kernel that returns the log-sum-exp.

It serves what the native kernels do not.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, G = H // K query heads of one KV head,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch

from ringserve.cp_core.attention.partial import Partial, empty_partial
from ringserve.cp_core.layout.step_plans import KvRun

# Up to this many tokens, the G query heads of a KV head become G * T rows of one head, so each K and V is read once
# instead of G times (65,536 keys, T = 1: 6.5 ms instead of 26.5). With more tokens, copying q costs what it saves.
MAX_FOLDED_TOKENS = 512
# A single token's rows of a KV head are padded to a multiple of this: MKL multiplies three rows by 2,048 keys more
# slowly than four: with three KV heads a layer takes 607 us with three rows and 489 us with four, 405 us with seven and
# 374 us with eight.
ROW_MULTIPLE = 4


class TorchCpuFlash:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, guarded against its traps (torch 2.13).

    The kernel raises SIGFPE on zero lengths, aligns causal masks to the top left, and returns 16-bit results for 16-bit
    inputs, which rounds every partial. 16-bit inputs are therefore copied to fp32. K and V in fp32 are read strided,
    without a copy.
    """

    name: ClassVar[str] = "torch_cpu_flash"
    is_fast: ClassVar[bool] = True

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.float16)

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend."""
        num_tokens, num_heads, _ = q.shape
        num_stored, num_kv_heads, _ = k.shape
        assert not causal or num_tokens == num_stored, f"causal needs T == S, not {num_tokens} and {num_stored}"
        if not num_tokens or not num_stored:
            return empty_partial(q)
        if num_tokens == 1 and num_heads != num_kv_heads:  # here causal and full attention are the same
            return self.attend_rows(q, [KvRun(k, v)], scale=scale)
        folded = num_heads != num_kv_heads and num_tokens <= MAX_FOLDED_TOKENS and not causal
        q_bhtd = _fold(q.float(), num_kv_heads) if folded else q.float().transpose(0, 1).unsqueeze(0)
        out_bhtd, lse_bht = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_bhtd,
            k.float().transpose(0, 1).unsqueeze(0),
            v.float().transpose(0, 1).unsqueeze(0),
            0.0,
            causal,
            scale=scale,
        )
        if not folded:
            return Partial(out_bhtd[0].transpose(0, 1), lse_bht[0].transpose(0, 1))
        return _unfold(out_bhtd, lse_bht, num_tokens, num_heads)

    def attend_masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, *, scale: float
    ) -> Partial:
        """See MaskedAttention. The kernel's LSE of a row that sees no key is 0; here it becomes -inf."""
        out_bhtd, lse_bht = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float().transpose(0, 1).unsqueeze(0),
            k.float().transpose(0, 1).unsqueeze(0),
            v.float().transpose(0, 1).unsqueeze(0),
            0.0,
            False,
            attn_mask=torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None],
            scale=scale,
        )
        lse_th = lse_bht[0].transpose(0, 1).masked_fill(hidden.all(dim=1)[:, None], -torch.inf)
        return Partial(out_bhtd[0].transpose(0, 1), lse_th)

    def attend_newest(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> Partial:
        """See NewestAttention. The mask is made once for all layers: their sizes are the same."""
        num_tokens, num_heads, _ = q.shape
        num_stored, num_kv_heads, _ = k.shape
        group = num_heads // num_kv_heads
        out_bhtd, lse_bht = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _fold(q.float(), num_kv_heads),
            k.float().transpose(0, 1).unsqueeze(0),
            v.float().transpose(0, 1).unsqueeze(0),
            0.0,
            False,
            attn_mask=_newest_mask(num_tokens, num_stored, group),
            scale=scale,
        )
        return _unfold(out_bhtd, lse_bht, num_tokens, num_heads)

    def attend_rows(self, q: torch.Tensor, runs: Sequence[KvRun], *, scale: float) -> Partial:
        """See RowAttention. Shared work is done once, so a row costs two views and the kernel."""
        batch, num_heads, head_dim = q.shape
        num_kv_heads = runs[0].k.shape[1]
        group = num_heads // num_kv_heads
        q_bkgd = q.float().reshape(batch, 1, num_kv_heads, group, head_dim)
        if group > 1 and group % ROW_MULTIPLE:
            q_bkgd = torch.nn.functional.pad(q_bkgd, (0, 0, 0, -group % ROW_MULTIPLE))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        is_wide = runs[0].k.dtype == torch.float32
        outs, lses = [], []
        for q_1kgd, run in zip(q_bkgd.unbind(0), runs, strict=True):
            k_skd, v_skd = (run.k, run.v) if is_wide else (run.k.float(), run.v.float())
            out, lse = kernel(
                q_1kgd, k_skd.transpose(0, 1).unsqueeze(0), v_skd.transpose(0, 1).unsqueeze(0), 0.0, False, scale=scale
            )
            outs.append(out)
            lses.append(lse)
        return Partial(
            torch.cat(outs)[:, :, :group].reshape(batch, num_heads, head_dim),
            torch.cat(lses)[:, :, :group].reshape(batch, num_heads),
        )


def _fold(q_thd: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return q[T, H, D] as [1, K, T * G, D]: a view if T is 1."""
    num_tokens, num_heads, head_dim = q_thd.shape
    q_tkgd = q_thd.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return q_tkgd.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)


def _unfold(out_bhtd: torch.Tensor, lse_bht: torch.Tensor, num_tokens: int, num_heads: int) -> Partial:
    """Return the part of folded queries: out [1, K, T * G, D] and lse [1, K, T * G] as [T, H, D] and [T, H]."""
    num_kv_heads, head_dim = out_bhtd.shape[1], out_bhtd.shape[3]
    out_ktgd = out_bhtd.view(num_kv_heads, num_tokens, -1, head_dim)
    lse_ktg = lse_bht.view(num_kv_heads, num_tokens, -1)
    return Partial(
        out_ktgd.transpose(0, 1).reshape(num_tokens, num_heads, head_dim),
        lse_ktg.transpose(0, 1).reshape(num_tokens, num_heads),
    )


@lru_cache(maxsize=64)
def _newest_mask(num_tokens: int, num_stored: int, group: int) -> torch.Tensor:
    """Return the mask [1, 1, T * G, S] of folded newest tokens: 0 for keys that a token sees, -inf for later ones."""
    mask_ts = torch.zeros(num_tokens, num_stored)
    mask_ts[:, num_stored - num_tokens :] = torch.full((num_tokens, num_tokens), -torch.inf).triu(1)
    return mask_ts.repeat_interleave(group, dim=0)[None, None]
