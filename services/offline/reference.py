"""Stock transformers in one process: the reference that every answer must equal, token for token.

The demo, `bench` and tests use it; it loads the model into their process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.utils.logging import disable_progress_bar


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy answer, and the smallest lead of its tokens over the second-best token, in logits.

    `seconds[i]` is the time from the call to token i.
    """

    token_ids: list[int]
    smallest_lead: float
    seconds: tuple[float, ...]


class StockModel:
    """Model directory that transformers runs, in float32 on the CPU unless told otherwise."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        disable_progress_bar()
        self._known: list[int] = []
        # Without the model's config the cache keeps all tokens of layers with a window too, so it can be cut anywhere.
        self._known_cache: Cache = DynamicCache()
        self._device = device
        loaded = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=dtype)
        self._model = loaded.to(device).eval()

    @torch.inference_mode()
    def greedy(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        cache: Cache | None = None,
    ) -> Reference:
        """Prefill `prompt` in one pass, then decode one token at a time with transformers' own cache.

        `cache` holds the KV of tokens before the prompt, and gains the KV of all tokens but the answer's last.
        """
        tokens: list[int] = []
        seconds: list[float] = []
        lead = float("inf")
        began = time.perf_counter()
        inputs = torch.tensor([list(prompt)], device=self._device)
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop_token_ids):
            output = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            best = torch.topk(output.logits[0, -1], 2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            seconds.append(time.perf_counter() - began)
            inputs = torch.tensor([[tokens[-1]]], device=self._device)
        return Reference(tokens, lead, tuple(seconds))

    @torch.inference_mode()
    def follow(self, prompt: Sequence[int], answer: Sequence[int]) -> Reference:
        """Return transformers' own choice at every place of `answer`, given the prompt and the answer up to there.

        If all choices equal the answer, it is the greedy one, by induction. That takes one pass over the new tokens: KV
        of tokens that this call shares with the call before is used again.
        """
        tokens = [*prompt, *answer[:-1]]
        began = time.perf_counter()
        shared = 0
        for known, token in zip(self._known, tokens[: len(prompt) - 1], strict=False):
            if known != token:
                break
            shared += 1
        self._known_cache.crop(shared - len(self._known))
        output = self._model(
            torch.tensor([tokens[shared:]], device=self._device),
            past_key_values=self._known_cache,
            use_cache=True,
            logits_to_keep=len(answer),
        )
        self._known, self._known_cache = tokens, output.past_key_values
        best = torch.topk(output.logits[0], 2)
        lead = float((best.values[:, 0] - best.values[:, 1]).min())
        seconds = time.perf_counter() - began
        return Reference(best.indices[:, 0].tolist(), lead, (seconds,) * len(answer))
