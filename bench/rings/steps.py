"""`python -m bench steps`: one rank's steps of prefill and decode, for each form that its layers can have.

Its command and the GPU bench use it. The rank is a ring of one in the bench's process, without a service. It owns a
cache of random KV, whose blocks are used in random order, and changes the model's layers.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.report import Row
from bench.rings.model_rank import BLOCK_TOKENS, blocks_for
from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.cost.decode import GATHER
from ringserve.cp_core.layout.shards import balanced_layout
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.services.offline.terminal import Tell
from ringserve.workers.decode.batch import BatchState
from ringserve.workers.decode.graphs import CudaRecorder, GraphRunner, PromptRunner, Recorder
from ringserve.workers.decode.messages import BatchChange
from ringserve.workers.decode.step import DecodePass
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.model.builtin import write_tokenizer
from ringserve.workers.model.layers import ATTENTION_LAYERS, MLP_LAYERS, join_layers, quantize_mlps
from ringserve.workers.model.loading import DTYPES, IMPLEMENTATION, LoadedModel, draw_model, load_model
from ringserve.workers.prefill.step import run_prefill
from ringserve.workers.protocol.ranks import FP8_MLPS
from ringserve.workers.protocol.steps import AdmitSequence, Algorithm, PrefillStep, SequencePrefill, TokenIds
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import Sampled, SamplingParameters

RING_SECONDS = 600.0
# Steps before the measured ones: kernels are chosen, compiled and recorded in them.
WARM_STEPS = 4
WARM_PROMPTS = 2
NUM_DRAFTS = 7
COMPARED_TOKENS = 512

TRANSFORMERS = "transformers"
STOCK = "stock"
JOINED = "joined"
PACKED = "packed"
COMPILED = "compiled"
RECORDED = "recorded"
AHEAD = "ahead"
DRAFTED = "drafted"
FORMS = (TRANSFORMERS, STOCK, JOINED, COMPILED, RECORDED, AHEAD, DRAFTED, FP8_MLPS)
FORMS_OF_CPUS = (TRANSFORMERS, STOCK, JOINED, FP8_MLPS)
FORMS_OF_RANKS = (TRANSFORMERS, STOCK, PACKED)
"""`transformers` brings its own attention and cache, `stock` only its modules; `packed` is the form of ranks on CPUs.

`drafted` steps check NUM_DRAFTS drafts of each sequence and reject all. The forms after `compiled` record short prompts
too. On a CPU nothing is recorded, and layers of 8-bit floats show how far their logits differ, but not how fast a GPU
is.
"""

LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class StepCases:
    """Cases of a run: the new tokens of each prompt, and (sequences, context tokens of each) of each decode step."""

    prefill: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    num_steps: int

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the KV of any case."""
        steps = WARM_STEPS + self.num_steps + NUM_DRAFTS
        batches = [batch * blocks_for(context + steps) for batch, context in self.decode]
        return max([*map(blocks_for, (*self.prefill, COMPARED_TOKENS)), *batches])


@dataclass(frozen=True, slots=True)
class LogitsChange:
    """Change of a prompt's logits by another form of the layers.

    `mean` and `largest` are absolute differences, `loss` the Kullback-Leibler divergence in nats a token, and `same`
    the share of tokens whose most likely successor is the same.
    """

    form: str
    mean: float
    largest: float
    loss: float
    same: float

    @classmethod
    def of(cls, form: str, before: Tensor, after: Tensor) -> LogitsChange:
        """Compare logits [T, vocabulary]."""
        difference = (after.double() - before.double()).abs()
        was, now = (each.double().log_softmax(dim=-1) for each in (before, after))
        return cls(
            form=form,
            mean=float(difference.mean()),
            largest=float(difference.max()),
            loss=float((was.exp() * (was - now)).sum(dim=-1).mean()),
            same=float((before.argmax(dim=-1) == after.argmax(dim=-1)).double().mean()),
        )

    def __str__(self) -> str:
        return (
            f"{self.form}: logits differ by {self.mean:.3g} (at most {self.largest:.3g}), {self.loss:.2e} nats a "
            f"token; {self.same:.1%} of the most likely tokens are the same"
        )


def step_row(what: str, case: str, form: str, seconds: float) -> Row:
    """Return the median seconds of a step, by the form of the layers."""
    return Row(keys={"what": what, "case": case, "form": form}, figures={"seconds": seconds})


@contextmanager
def bench_model(path: Path | None, num_layers: int | None, dtype: str, device: str) -> Iterator[LoadedModel]:
    """Load the model in `path`; without one draw one of the shape of Llama 3 8B. Raises ModelRefused."""
    if path is not None:
        yield load_model(path, dtype, device)
        return
    with bench_shape(LLAMA_3_8B | ({"num_hidden_layers": num_layers} if num_layers else {}), dtype, device) as model:
        yield model


@contextmanager
def bench_shape(shape: Mapping[str, Any], dtype: str, device: str) -> Iterator[LoadedModel]:
    """Draw a model of a shape. Raises ModelRefused."""
    with tempfile.TemporaryDirectory(prefix="ringserve-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(shape)))
        yield draw_model(Path(folder), dtype, device)


def write_drawn_model(folder: Path, shape: Mapping[str, Any], dtype: str, device: str) -> None:
    """Write a model directory of a shape with random weights, drawn on `device`, and a tokenizer of bytes."""
    (folder / "config.json").write_text(json.dumps(dict(shape)))
    disable_progress_bar()
    model: Any = draw_model(folder, dtype, device).model
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**shape, "dtype": dtype}))
    write_tokenizer(folder, shape["max_position_embeddings"])


class StepBench:
    """Rank without a service, whose layers take one form after the other."""

    def __init__(
        self,
        model: LoadedModel,
        cases: StepCases,
        num_rounds: int,
        attention_backend: str = "auto",
        recorder: Recorder | None = None,
        compiler: str = "inductor",
    ) -> None:
        """Take the model as it is loaded; tests without a GPU give another `recorder` and `compiler`.

        Raises ConfigError for an attention backend that does not serve the device.
        """
        device, dtype, share = model.model.device, DTYPES[model.info.kv_dtype], model.share
        self._model = model
        self._cases = cases
        self._num_rounds = num_rounds
        self._recorder = recorder or CudaRecorder(device)
        self._compiler = compiler
        self._runner: GraphRunner | None = None
        self._prompts: PromptRunner | None = None
        self._backend: AttentionBackend = select_backend(attention_backend, device, dtype)
        self._cache = KvCache(
            num_layers=share.num_layers,
            num_blocks=cases.num_blocks,
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=share.num_kv_heads,
            head_dim=share.head_dim,
            dtype=dtype,
            device=device,
        )
        self._cache.fill_random(0)
        self._blocks = random.Random(0).sample(range(cases.num_blocks), cases.num_blocks)
        (self._ring,) = InProcessRing(1, RING_SECONDS).transports

    def measure(
        self, forms: tuple[str, ...], tell: Tell, only: Container[str] | None = None
    ) -> tuple[list[Row], list[LogitsChange]]:
        """Bring the layers into each form in turn, and measure every case in the forms of `only` (None: in all)."""
        figures, changes = list[Row](), list[LogitsChange]()
        with torch.inference_mode():
            before = self._logits()
            for form in forms:
                tell(form)
                self._take(form)
                if only is not None and form not in only:
                    continue
                figures += self._figures(form)
                if form == FP8_MLPS:
                    changes.append(LogitsChange.of(form, before, self._logits()))
        return figures, changes

    def _take(self, form: str) -> None:
        """Bring the layers from the form before into this one."""
        if form == PACKED:
            self._model.pack_weights(with_head=True)
        if form == JOINED:
            for names in (ATTENTION_LAYERS, MLP_LAYERS):
                join_layers(self._model.body, names)
        is_compiled = self._model.pieces is not None
        if form == FP8_MLPS:
            quantize_mlps(self._model.body)
            self._model = replace(self._model, pieces=None)
        if form == COMPILED or (form == FP8_MLPS and is_compiled):
            self._model = self._model.compiled(self._compiler)
        if form == RECORDED or self._runner is not None:
            self._runner = GraphRunner(self._model, self._recorder, self._cache.device)
            self._prompts = PromptRunner(self._model, self._recorder, self._cache.device)

    def _figures(self, form: str) -> Iterator[Row]:
        if form == TRANSFORMERS:
            yield from self._figures_of_transformers()
            return
        for tokens in self._cases.prefill if form not in (AHEAD, DRAFTED) else ():
            yield step_row("prefill", f"{tokens:,}", form, self._prefill_seconds(tokens))
        for batch, context in self._cases.decode:
            num_drafts = NUM_DRAFTS if form == DRAFTED else 0
            seconds = self._decode_seconds(batch, context, is_ahead=form == AHEAD, num_drafts=num_drafts)
            yield step_row("decode", f"{batch} x {context:,}", form, seconds)

    def _figures_of_transformers(self) -> Iterator[Row]:
        """Measure the same modules as transformers runs them: its attention for the device, a cache that it grows."""
        model: Any = self._model.model
        model.set_attn_implementation("sdpa")
        for tokens in self._cases.prefill:
            ids = torch.from_numpy(self._prompt(tokens))[None].to(model.device)

            def prefill(ids: Tensor = ids) -> None:
                model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(dim=-1).tolist()

            yield step_row("prefill", f"{tokens:,}", TRANSFORMERS, self._median_seconds(prefill))
        for batch, context in self._cases.decode:
            share, cache = self._model.share, DynamicCache()
            for layer in range(share.num_layers):
                shape = (batch, share.num_kv_heads, context, share.head_dim)
                cache.update(*(torch.rand(shape, dtype=model.dtype, device=model.device) for _ in range(2)), layer)
            ids, times = torch.zeros(batch, 1, dtype=torch.int64, device=model.device), []
            for _ in range(WARM_STEPS + self._cases.num_steps):
                began = time.perf_counter()
                ids = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)
                ids.tolist()
                times.append(time.perf_counter() - began)
            yield step_row("decode", f"{batch} x {context:,}", TRANSFORMERS, median(times[WARM_STEPS:]))
        model.set_attn_implementation(IMPLEMENTATION)

    def _median_seconds(self, run: Callable[[], object]) -> float:
        times = []
        for _ in range(WARM_PROMPTS + self._num_rounds):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return median(times[WARM_PROMPTS:])

    def _prefill_seconds(self, tokens: int) -> float:
        """Return the median seconds of a prompt, with its first token."""
        return self._median_seconds(lambda: self._logits(tokens, last_row=True).argmax(dim=-1).tolist())

    def _prompt(self, tokens: int) -> TokenIds:
        return np.random.default_rng(0).integers(self._model.info.vocab_size, size=tokens)

    def _decode_seconds(self, batch: int, context: int, *, is_ahead: bool, num_drafts: int) -> float:
        """Return the median seconds of a step until its tokens are read.

        If `is_ahead`, the next step is issued before they are read. All drafts are rejected, even if right by chance.
        """
        state = BatchState(0, 1, BLOCK_TOKENS)
        each = blocks_for(context + WARM_STEPS + self._cases.num_steps + num_drafts)
        admitted = tuple(
            AdmitSequence(
                sequence_id=str(row),
                token_id=row,
                position=context,
                held=(context,),
                blocks=(tuple(self._blocks[row * each : (row + 1) * each]),),
                sampling=SamplingParameters(max_tokens=1 << 20),
            )
            for row in range(batch)
        )
        state.advance((), BatchChange(admitted=admitted))
        step = DecodePass(
            self._model,
            self._ring,
            self._cache,
            self._backend,
            state,
            runner=self._runner,
            is_asynchronous=True if is_ahead else None,
        )
        times, sampled = list[float](), list[Sampled]()
        num_steps = WARM_STEPS + self._cases.num_steps
        while len(times) < num_steps:
            state.draft([[row] * num_drafts for row in range(batch)])
            began = time.perf_counter()
            for done in step.run(GATHER, lambda: is_ahead and len(times) < num_steps - 1):
                ended = time.perf_counter()
                times.append(ended - began)
                began, sampled = ended, done.sampled
            newest = sampled[:: 1 + num_drafts]
            state.advance([drawn.token_id or 0 for drawn in newest], BatchChange(), [0] * batch if num_drafts else ())
        return median(times[WARM_STEPS:])

    def _logits(self, tokens: int = COMPARED_TOKENS, *, last_row: bool = False) -> Tensor:
        """Compute a prompt of random tokens -> logits [T, vocabulary] on the host, or those of the last token alone."""
        sequence = SequencePrefill(
            sequence_id="prompt",
            token_ids=self._prompt(tokens),
            layout=balanced_layout(0, tokens, (0,)),
            cached=(0,),
            blocks=tuple(self._blocks[: blocks_for(tokens)]),
        )
        step = PrefillStep(algorithm=Algorithm.PASS_KV, sequences=(sequence,))
        _, states = run_prefill(
            step,
            self._model,
            self._ring,
            self._cache,
            self._backend,
            _send_nothing,
            hidden_states=None if self._prompts is None else self._prompts.hidden_states,
        )
        return self._model.logits(states[-1:] if last_row else states).cpu()


def _send_nothing(key: TransferKey, layer: int) -> None:
    raise AssertionError("a bench sends no KV")
