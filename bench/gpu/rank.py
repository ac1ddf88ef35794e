"""Figures of one rank on a GPU: kernels, steps and their prediction, and the memory of the host while weights load.

They are parts of `python -m bench gpu`, which runs each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from bench.gpu.table import (
    HOST_MEMORY_OVER_SHARE,
    MERGE_OF_FEW_SECONDS,
    PREDICTION_ERROR,
    SHARE_OF_COPY,
    TTFT_SECONDS,
    TTIT_SECONDS,
    Line,
    Place,
    drawn_model,
)
from bench.report import Row
from bench.rings.attention import AttentionShape
from bench.rings.kernels import measure_kernels
from bench.rings.rounds import peak_memory_bytes
from bench.rings.steps import (
    AHEAD,
    COMPILED,
    FORMS,
    FORMS_OF_CPUS,
    JOINED,
    TRANSFORMERS,
    StepBench,
    StepCases,
    bench_shape,
)
from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.cost.model import PASS_KV, PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.workers.model.loading import DTYPES, LoadedModel, load_model
from ringserve.workers.rank.parts import FP8_CAPABILITY
from ringserve.workers.rank.probe import finished, probe_rates

# Sizes from which the rate of a kernel counts: with smaller sizes the start of the call takes most of the time.
LARGE_MERGE_ROWS = 1024
LARGE_DECODE_TOKENS = 1 << 17
LOAD_SECONDS = 300.0


def kernels(place: Place) -> Iterator[Line]:
    """Measure attention by every backend, and decode and merge as shares of the device's copy rate."""
    heads, kv_heads = place.shape["num_attention_heads"], place.shape["num_key_value_heads"]
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=place.shape["hidden_size"] // heads)
    device, dtype = torch.device(place.device), DTYPES[place.dtype]
    figures = measure_kernels(shape, device, dtype, place.kernels, place.rounds, lambda _: None)
    copy_rate = next(each.value("rate") for each in figures if each.keys["what"] == "copy")
    for each in figures:
        what, case, kernel = each.keys.values()
        beside = f"{each.value('milliseconds'):.3f} ms"
        unit = str(each.figures["unit"])
        yield Line(part="kernels", text=f"{what} {case}, {kernel}", value=each.value("rate"), unit=unit, beside=beside)
        yield from _bandwidth(each, copy_rate)


def _bandwidth(figure: Row, copy_rate: float) -> Iterator[Line]:
    """Yield what a decode or a merge is judged by: its share of the copy rate, or the time of a merge of few rows."""
    numbers = [int(word.replace(",", "")) for word in str(figure.keys["case"]).split() if word[0].isdecimal()]
    share = Line(part="kernels", text="  of the copy rate", value=figure.value("rate") / copy_rate, is_at_least=True)
    if figure.keys["what"] == "decode":
        batch, stored = numbers
        yield replace(share, limit=SHARE_OF_COPY if batch * stored >= LARGE_DECODE_TOKENS else None)
    elif figure.keys["what"] == "merge" and numbers[0] >= LARGE_MERGE_ROWS:
        yield replace(share, limit=SHARE_OF_COPY)
    elif figure.keys["what"] == "merge":
        yield replace(
            share,
            text="  of few rows",
            value=1e-3 * figure.value("milliseconds"),
            unit="s",
            limit=MERGE_OF_FEW_SECONDS,
            is_at_least=False,
        )


def steps(place: Place) -> Iterator[Line]:
    """Measure a rank's steps by every form of its layers, beside transformers, and what was predicted for prompts."""
    cases = StepCases(prefill=place.prompts, decode=place.contexts, num_steps=place.steps)
    forms: tuple[str, ...] = FORMS if place.is_gpu else FORMS_OF_CPUS
    if place.is_gpu and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        forms = forms[:-1]
    with bench_shape(place.shape, place.dtype, place.device) as model:
        predicted = _predicted(place, model)
        figures, changes = StepBench(model, cases, place.rounds).measure(forms, lambda _: None)
    theirs = {
        (each.keys["what"], each.keys["case"]): each.value("seconds")
        for each in figures
        if each.keys["form"] == TRANSFORMERS
    }
    limits = {("prefill", f"{tokens:,}", COMPILED): limit for tokens, limit in TTFT_SECONDS.items()}
    limits |= {("decode", f"{rows} x {held:,}", AHEAD): limit for (rows, held), limit in TTIT_SECONDS.items()}
    serving = COMPILED if place.is_gpu else JOINED
    for each in figures:
        what, case, form = map(str, each.keys.values())
        seconds = each.value("seconds")
        yield Line(
            part="steps",
            text=f"{what} {case}, {form}",
            value=seconds,
            unit="s",
            limit=limits.get((what, case, form)),
            beside=f"transformers {theirs[what, case]:.4g} s",
        )
        if (what, form) == ("prefill", serving):
            yield Line(
                part="steps",
                text="  error of its prediction",
                value=abs(predicted[case] / seconds - 1.0),
                limit=PREDICTION_ERROR if place.is_gpu else None,
                beside=f"predicted {predicted[case]:.4g} s",
            )
    for change in changes:
        yield Line(part="steps", text="same most likely tokens, fp8", value=change.same, beside=str(change))


def _predicted(place: Place, model: LoadedModel) -> dict[str, float]:
    """Return the seconds that a ring of this rank predicts for each prompt, by the rates it measures at its start."""
    device = model.model.device
    backend = select_backend("auto", device, DTYPES[model.info.kv_dtype])
    (ring,) = InProcessRing(1).transports
    with torch.inference_mode():
        rates = PrefillRates(ring=finished(probe_rates(model.share, device, backend, ring)))
    return {
        f"{tokens:,}": StepPredictor(model.share.shape, rates, 1).cost(PASS_KV, tokens, 0).total_seconds
        for tokens in place.prompts
    }


def loading(place: Place) -> Iterator[Line]:
    """Load a model from its directory in a process of its own, and measure the time and the peak of host memory."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with drawn_model(place) as path:
        loader = spawn.Process(target=_load, args=(path, place, there), daemon=True)
        loader.start()
        there.close()
        try:
            if not here.poll(LOAD_SECONDS):
                raise Unavailable(f"the model was not loaded within {LOAD_SECONDS:g} s")
            seconds, host_bytes, share_bytes = here.recv()
        except EOFError:
            raise Unavailable("the process that loads the model has ended") from None
        finally:
            loader.kill()
            loader.join()
    beside = f"{host_bytes / 1e9:.2f} GB of the host, {share_bytes / 1e9:.2f} GB of weights"
    yield Line(part="loading", text="seconds", value=seconds, unit="s")
    yield Line(
        part="loading",
        text="peak of the host's memory over the share",
        value=host_bytes / share_bytes,
        limit=HOST_MEMORY_OVER_SHARE if place.is_gpu else None,
        beside=beside,
    )


def _load(path: Path, place: Place, answer: Connection) -> None:
    torch.zeros(1, device=place.device)  # loads the device's libraries, whose memory does not count
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    model = load_model(path, place.dtype, place.device)
    if place.is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    share = model.share.num_parameters * model.share.element_bytes
    answer.send((seconds, max(0, peak_memory_bytes() - before), share))
