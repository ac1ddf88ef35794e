"""Demo of length: a code among a million tokens, found by the needle model through a whole service.

The needle bench runs it. The oracle computes the same answer in one process, without rings, scheduled chunks, KV
blocks or moved KV. It attends in blocks of queries: a square of all tokens against all would need terabytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bench.needle.model import MAX_POSITIONS, needle_path
from ringserve.client import Client, Sampling
from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import (
    Config,
    DecodeConfig,
    GatewayConfig,
    KvCacheConfig,
    LogConfig,
    ModelConfig,
    PrefillConfig,
    RouterConfig,
)
from ringserve.services.rpc.answer import answer_dict

CODE: Final = "#48213.#"
"""The code between its `#` and `.`, and a last `#`, which goes to the end of the prompt and asks for the code."""
ANSWER: Final = "48213."
CONVERSATION: Final = "needle"
SEED: Final = 18
LEAST_TOKENS: Final = 64
CHUNK_TOKENS: Final = 8192
LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz      "
# Seconds that a turn may take: attention of a million tokens on two busy cores takes most of an hour.
MOST_SECONDS: Final = 4 * 3600.0
QUERY_BLOCK: Final = 4096


def needle_config(num_tokens: int) -> Config:
    """Return the configuration of two rings of two ranks on loopback that hold so many tokens. Raises ConfigError."""
    most = MAX_POSITIONS - len(ANSWER)
    if not LEAST_TOKENS <= num_tokens <= most:
        raise ConfigError(f"--tokens: {num_tokens} is not allowed; the needle model reads {LEAST_TOKENS} to {most}")
    return Config(
        model=ModelConfig(path=str(needle_path())),
        # Only `chunk_tokens` bounds a step: no other turn waits on this ring.
        prefill=PrefillConfig(cp=2, chunk_tokens=CHUNK_TOKENS, step_seconds=0.0, step_budget=1e12),
        decode=DecodeConfig(cp=2, max_batch=2),
        kv_cache=KvCacheConfig(tokens_per_rank=(num_tokens + CHUNK_TOKENS) // 2 + 1024),
        router=RouterConfig(journal=""),
        gateway=GatewayConfig(listen="127.0.0.1:0", http="", metrics="127.0.0.1:0", max_seconds=MOST_SECONDS),
        logs=LogConfig(level="warning"),
    )


def haystack(num_tokens: int, depth: float) -> str:
    """Return a text of so many tokens with a code at `depth`, 0 to 1, that asks for it at its end."""
    generator = np.random.Generator(np.random.Philox(SEED))
    letters = bytes(np.frombuffer(LETTERS, np.uint8)[generator.integers(0, len(LETTERS), num_tokens - len(CODE))])
    place = round(depth * len(letters))
    code, question = CODE[:-1], CODE[-1]
    return (letters[:place] + code.encode() + letters[place:] + question.encode()).decode("ascii")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCode:
    """Answer of the service: the object that `generate --json` prints, and log-probabilities of its tokens.

    `seconds` are those of the whole call, `peak_bytes` the most memory of each process of the service by its name.
    """

    answer: dict[str, Any]
    logprobs: list[float]
    seconds: float
    tokens_per_rank: dict[str, list[int]]
    peak_bytes: dict[str, int]


def ask(gateway: str, text: str) -> FoundCode:
    """Send the text to a gateway and return the answer."""
    sampling = Sampling(max_tokens=len(ANSWER), temperature=0.0, logprobs=0)
    began = time.monotonic()
    with Client(gateway) as client:
        answer = client.ask(text, conversation_id=CONVERSATION, sampling=sampling, timeout=MOST_SECONDS)
        seconds = time.monotonic() - began
        placements = client.conversation(CONVERSATION).placements
    return FoundCode(
        answer=answer_dict(answer),
        logprobs=[each.logprob for each in answer.logprobs],
        seconds=seconds,
        tokens_per_rank={place.ring: [rank.num_tokens for rank in place.ranks] for place in placements},
        peak_bytes=peak_memory(),
    )


def peak_memory() -> dict[str, int]:
    """Return the peak of resident bytes of each process of the service, by its name. Works only on Linux."""
    found: dict[str, int] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            name = child.cmdline()[0].removeprefix("ray::")
            status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        except (psutil.Error, OSError, IndexError):
            continue  # it has ended
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        if peak and re.match(r"(router$|\S+ (leader|rank \d+)$)", name.removesuffix(".control")):
            found[name.removesuffix(".control")] = 1024 * int(peak[1])
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What one process chooses at each place of a given answer.

    `logprobs` are those of the given tokens. A lead is the choice's logit minus that of the second-best token.
    """

    token_ids: list[int]
    logprobs: list[float]
    smallest_lead: float
    seconds: float


@torch.inference_mode()
def expected(path: Path, prompt: Sequence[int], answer: Sequence[int]) -> Expected:
    """Return what one process chooses at every place of `answer`, after the prompt and the answer before that place."""
    began = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32).eval()
    tokens = torch.tensor([[*prompt, *answer[:-1]]])
    layers, rows = model.model.layers, len(answer)
    hidden = model.model.embed_tokens(tokens)[0]
    cosine, sine = model.model.rotary_emb(hidden[None], torch.arange(len(hidden))[None])
    for number, layer in enumerate(layers):
        normed = layer.input_layernorm(hidden)
        attention = layer.self_attn
        q, k, v = (
            projection(normed).view(1, len(normed), -1, attention.head_dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cosine, sine)
        # Of the last layer only the rows that choose tokens are needed.
        first = len(hidden) - rows if number == len(layers) - 1 else 0
        out = _attend(q, k, v, first, attention.scaling)
        hidden = hidden[first:] + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits = model.lm_head(model.model.norm(hidden)).double()
    best = torch.topk(logits, 2)
    given = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    return Expected(
        token_ids=best.indices[:, 0].tolist(),
        logprobs=given.tolist(),
        smallest_lead=float((best.values[:, 0] - best.values[:, 1]).min()),
        seconds=time.monotonic() - began,
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Return causal attention [rows, H * D] of the queries from row `first` on over all keys, [1, K, T, D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = []
    for start in range(first, q.shape[2], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[2])
        own = slice(start, stop)
        out, lse = kernel(q[:, :, own], k[:, :, own], v[:, :, own], 0.0, True, scale=scale)
        if start:
            before, before_lse = kernel(q[:, :, own], k[:, :, :start], v[:, :, :start], 0.0, False, scale=scale)
            share = torch.sigmoid(before_lse - lse)[..., None]
            out = out + share * (before - out)
        parts.append(out)
    return torch.cat(parts, 2)[0].transpose(0, 1).flatten(1)
