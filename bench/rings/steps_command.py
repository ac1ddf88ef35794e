"""`python -m bench steps`: steps of one rank, by the form of its layers, and what 8-bit floats change.

The bench command line registers it with `add`; `run` loads the model and prints the figures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bench.options import Subcommands
from bench.report import table
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.terminal import console, print_table, progress_bar

EXAMPLE = """example:
  python -m bench steps --device cuda
  python -m bench steps --device cuda --model DIR --json
  python -m bench steps --device cuda --forms compiled,recorded,ahead,drafted --prefill 128,512,1024
  python -m bench steps --model builtin:smollm2 --prefill 512 --decode 1x512
  python -m bench steps --model builtin:smollm2 --packed --prefill 512,2048 --decode 1x512,1x6000,8x300
"""
HELP = """Prefill and decode of one rank in this process, without a service. transformers runs the model first, with
attention and cache of its own (transformers). The rank's layers then take these forms one by one: the stock modules
with the rank's attention (stock), projections with the same input as one layer (joined), compiled by torch
(compiled), decode steps and short prompts replayed from recordings (recorded), each step issued before the tokens of
the step before are read (ahead), steps that check seven drafts of each sequence and reject all (drafted), MLPs of
8-bit floats (fp8). On a CPU nothing is compiled.
At the end it says what 8-bit floats change in the logits and the most likely tokens of a prompt.
With --packed it measures the form of ranks on CPUs, in float32: packed weights, fused norms and MLPs (packed)."""
PIPE_WIDTH = 120


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "steps",
        help="steps of one rank, by the form of its layers",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--model", help="(default: the shape of Llama 3 8B with random weights)")
    parser.add_argument("--layers", type=int, help="layers of the model without --model (default: 32)")
    parser.add_argument("--prefill", default="512,8192,32768", help="tokens of prompts (default: 512,8192,32768)")
    parser.add_argument(
        "--decode", default="1x512,1x32768,16x8192", help="sequences x tokens (default: 1x512,1x32768,16x8192)"
    )
    parser.add_argument("--steps", type=int, default=30, help="decode steps of a measurement (default: 30)")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of a measurement (default: 5)")
    parser.add_argument(
        "--forms", help="forms to measure, with commas (default: all); the layers also take the forms before"
    )
    parser.add_argument("--packed", action="store_true", help="measure the form of ranks on CPUs too, in float32")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from bench.rings.steps import FORMS, FORMS_OF_CPUS, FORMS_OF_RANKS, StepBench, StepCases, bench_model
    from ringserve.workers.model.builtin import resolve_model_path
    from ringserve.workers.rank.parts import FP8_CAPABILITY

    for name in ("steps", "rounds", "layers"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name}: {value} is too few; allowed are 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: 'cuda', but torch finds no GPU here; allowed is cpu")
    if options.packed and options.device == "cuda":
        raise ConfigError("--packed: a form for CPUs, which excludes --device cuda")
    cases = StepCases(
        prefill=tuple(_number("--prefill", each) for each in options.prefill.split(",") if each),
        decode=tuple(_pair(each) for each in options.decode.split(",") if each),
        num_steps=options.steps,
    )
    forms: tuple[str, ...] = FORMS if options.device == "cuda" else FORMS_OF_CPUS
    if options.device == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        forms = forms[:-1]
    path = None if options.model is None else resolve_model_path(options.model)
    if options.packed:
        forms = FORMS_OF_RANKS
    only = options.forms.split(",") if options.forms else forms
    if unknown := [form for form in only if form not in forms]:
        raise ConfigError(f"--forms: there is no form {unknown[0]!r} here; allowed are {', '.join(forms)}")
    forms = forms[: 1 + max(map(forms.index, only))]
    dtype = "float32" if options.packed else "bfloat16"
    with bench_model(path, options.layers, dtype, options.device) as model, progress_bar(len(forms)) as tell:
        figures, changes = StepBench(model, cases, options.rounds).measure(forms, tell, only)
    if options.json:
        print(json.dumps({"steps": [row.as_dict() for row in figures], "changes": [asdict(each) for each in changes]}))
    else:
        print_table(console(pipe_width=PIPE_WIDTH), table([row.cells() for row in figures]), num_keys=2)
        print(*changes, sep="\n")
    return 0


def _number(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option}: {text!r} is not a whole number of 1 or more")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    return _number("--decode", batch), _number("--decode", context)
