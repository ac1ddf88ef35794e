"""Targets of one GPU, the sizes of its cases, and the lines that say what was measured, for `bench gpu`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Target
from bench.rings.kernels import GPU_SIZES, Sizes
from bench.rings.steps import LLAMA_3_8B, write_drawn_model

# Targets of one H100 and the shape of Llama 3 8B in bfloat16: TTFT by prompt, TTIT by (sequences, tokens of each).
TTFT_SECONDS = {512: 0.035, 8192: 0.24, 32768: 1.25}
TTIT_SECONDS = {(1, 512): 0.0075, (1, 32768): 0.0095, (16, 8192): 0.014}
SECOND_OVER_TTIT = 2.0
KV_GIGABYTES = 50.0
SHARE_OF_COPY = 0.9
MERGE_OF_FEW_SECONDS = 20e-6
PREDICTION_ERROR = 0.15
HOST_MEMORY_OVER_SHARE = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Line of the table. `value` may be at most, or at least, `limit`; `beside` is a text to compare it with."""

    part: str
    text: str
    value: float
    unit: str = ""
    limit: float | None = None
    is_at_least: bool = False
    beside: str = ""

    @property
    def target(self) -> Target | None:
        return None if self.limit is None else Target(self.text, self.value, self.limit, self.is_at_least)

    @property
    def verdict(self) -> str:
        return "" if self.target is None else self.target.verdict

    def __str__(self) -> str:
        bound, figure = "" if self.target is None else self.target.bound, f"{self.value:,.4g} {self.unit}".strip()
        return f"{self.part:8} {self.text:54} {figure:>14}  {bound:16} {self.verdict:6}  {self.beside}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Device of a run and the sizes of its cases. On a GPU the targets name them; a CPU gets small ones."""

    device: str
    dtype: str
    shape: Mapping[str, Any]
    kernels: Sizes
    prompts: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    rounds: int
    steps: int
    kv_message_bytes: int
    kv_messages: int
    answer_tokens: int

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


GPU = Place(
    device="cuda",
    dtype="bfloat16",
    shape=LLAMA_3_8B,
    kernels=GPU_SIZES,
    prompts=tuple(TTFT_SECONDS),
    contexts=tuple(TTIT_SECONDS),
    rounds=5,
    steps=30,
    kv_message_bytes=16 << 20,
    kv_messages=128,
    answer_tokens=32,
)
TOY = Place(
    device="cpu",
    dtype="float32",
    shape=LLAMA_3_8B
    | {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    kernels=Sizes(prefill=((32, 32, True),), decode=((2, 40),), merges=((8, 2),), vocabulary=50, copied_bytes=1 << 10),
    prompts=(24, 40),
    contexts=((1, 24), (2, 40)),
    rounds=1,
    steps=3,
    kv_message_bytes=64 << 10,
    kv_messages=2,
    answer_tokens=6,
)


@contextmanager
def drawn_model(place: Place) -> Iterator[Path]:
    """Yield a directory with a model of the place's shape: random weights, 16 GB of them on a GPU."""
    with tempfile.TemporaryDirectory(prefix="ringserve-bench-") as folder:
        write_drawn_model(Path(folder), place.shape, place.dtype, place.device)
        yield Path(folder)
