"""`python -m bench drafts`: time between tokens of the same turns with drafts of next tokens and without.

The bench command line registers it with `add`; `run` starts and stops a local cluster for each form of decode ring. The
comparison with peers uses its prompts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from bench.options import Subcommands
from bench.report import Report, Row, Target, told_load
from ringserve.client import Client
from ringserve.client.requests import Message, Sampling
from ringserve.client.results import Answer
from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster.local import LocalCluster
from ringserve.services.config import config_from
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.demo import FIRST, FOLLOW_UP, FORKED, document
from ringserve.services.offline.reports import load_now
from ringserve.services.offline.terminal import console, print_table, progress_bar
from ringserve.workers.model.builtin import resolve_model_path

HELP = """One cluster for each form of the decode ring. Every round asks for the same greedy answers twice, without
drafts and with them. Workloads are questions about the demo's document that are answered by sentences of it (document),
a file that is to be copied with small changes (edit), and stories (free). With --deepen the model has so many times its
layers, all added ones of which change nothing, and the original model drafts for it: so all its guesses are right, and
the time is the least that a draft model of that size can reach."""
EXAMPLE = """example:
  python -m bench drafts
  python -m bench drafts --forms 1:gather --batches 1 --rounds 5
  python -m bench drafts --forms 1:gather --batches 1 --workloads free --deepen 4
"""
FORMS = "1:gather,2:gather,2:pass_q,2:helix"
ANSWER = 128
WAIT_SECONDS = 600.0
LEGEND = (
    "without ms, with ms: between tokens, medians of the rounds; ratio: median of the rounds' ratios, and their range; "
    "accepted: right drafts in a step of one sequence; same: answers with the same tokens both times"
)
DOCUMENT, EDIT, FREE = "document", "edit", "free"
MOST_RATIO = {DOCUMENT: 0.6, EDIT: 0.45, FREE: 1.03}
LEAST_ACCEPTED = {DOCUMENT: 1.8, EDIT: 3.0}
FILE = '''import math


class Interval:
    """Closed interval of numbers."""

    def __init__(self, low: float, high: float) -> None:
        if math.isnan(low) or math.isnan(high):
            raise ValueError("an end is not a number")
        self.low = low
        self.high = high

    def width(self) -> float:
        return self.high - self.low

    def contains(self, number: float) -> bool:
        return self.low <= number <= self.high

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high

    def join(self, other: "Interval") -> "Interval":
        return Interval(min(self.low, other.low), max(self.high, other.high))
'''
STORIES = ("a lighthouse keeper", "a lost umbrella", "the last train", "a talking cat", "a broken clock")


@dataclass(frozen=True, slots=True)
class Form:
    """Decode ring: its ranks, and how its steps are computed."""

    ranks: int
    variant: str


def prompts(workload: str, text: str) -> list[str]:
    """Return the prompts of a workload. `text` is the demo's document."""
    wish = "Answer with the sentence of the log that says it."
    questions = [f"{each.text} {wish}" for each in (FIRST, FOLLOW_UP, FORKED)]
    questions.append("Repeat the first three sentences of the log, word by word.")
    return {
        DOCUMENT: [f"{text}\n\n{question}" for question in questions],
        EDIT: [
            f"```python\n{FILE}```\nCopy this file, and rename {name} to {name}_of. Answer with the whole file."
            for name in ("width", "contains", "overlaps", "join")
        ],
        FREE: [f"Tell a story about {each}." for each in STORIES],
    }[workload]


def batches_of(texts: Sequence[str], size: int) -> list[list[str]]:
    """Return the texts in batches of a size. If it exceeds their number, the one batch repeats them."""
    if size >= len(texts):
        return [[texts[number % len(texts)] for number in range(size)]]
    return [list(texts[start : start + size]) for start in range(0, len(texts), size)]


class Service:
    """Cluster of one form, and a client of it."""

    def __init__(self, model: str, form: Form, max_batch: int, draft_model: str = "") -> None:
        config = config_from(
            {
                "model": {"path": model},
                "prefill": {"cp": 2},
                "decode": {
                    "cp": form.ranks,
                    "variant": form.variant,
                    "max_batch": max_batch,
                    "draft_model": draft_model,
                },
                "gateway": {"listen": "127.0.0.1:0", "http": "", "metrics": ""},
                "kv_cache": {"tokens_per_rank": 16_384},
                "logs": {"level": "error"},
            }
        )
        self._cluster = LocalCluster(config, lambda _: None)
        try:
            self._cluster.start()
            self._client = Client(self._cluster.gateway_address)
        except BaseException:
            self._cluster.stop()
            raise

    def ask(self, texts: Sequence[str], max_drafts: int | None) -> list[Answer]:
        """Ask all at the same time."""

        def one(text: str) -> Answer:
            sampling = Sampling(temperature=0.0, max_tokens=ANSWER, max_draft_tokens=max_drafts)
            return self._client.ask([Message(role="user", content=text)], sampling=sampling, timeout=WAIT_SECONDS)

        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(one, texts))

    def close(self) -> None:
        self._client.close()
        self._cluster.stop()


def measure(service: Service, form: Form, workload: str, batches: Sequence[Sequence[str]], num_rounds: int) -> Row:
    """Measure the batches of a workload -> their row: times between tokens without and with drafts, and right drafts.

    Times are of all tokens but the first of each answer, so a long answer counts more than a short one.
    """
    plain, drafted, ratios, accepted = list[float](), list[float](), list[float](), list[float]()
    same, of = 0, 0
    for texts in batches:
        service.ask(texts, 0)  # the prompts are cached from here on
    for _ in range(num_rounds):
        without, with_drafts = list[Answer](), list[Answer]()
        for texts in batches:
            without += service.ask(texts, 0)
            with_drafts += service.ask(texts, None)
        plain.append(between_tokens(without))
        drafted.append(between_tokens(with_drafts))
        ratios.append(drafted[-1] / plain[-1])
        num_drafted = sum(each.usage.accepted_draft_tokens for each in with_drafts)
        num_steps = sum(each.usage.completion_tokens - 1 for each in with_drafts) - num_drafted
        accepted.append(num_drafted / max(1, num_steps))
        of += len(without)
        same += sum(one.token_ids == other.token_ids for one, other in zip(without, with_drafts, strict=True))
    return Row(
        keys={"workload": workload, "ranks": form.ranks, "variant": form.variant, "batch": len(batches[0])},
        figures={
            "without_drafts": median(plain),
            "with_drafts": median(drafted),
            "drafts_ratio": median(ratios),
            "ratios": f"{min(ratios):.2f} to {max(ratios):.2f}",
            "accepted": median(accepted),
            "same": f"{same} of {of}",
        },
    )


def deepened(path: Path, directory: Path, factor: int) -> Path:
    """Write the model in `path` with `factor` times its layers; the further ones add nothing to their inputs."""
    config = json.loads((path / "config.json").read_text())
    own = config["num_hidden_layers"]
    weights = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for number in range(own, factor * own):
        for name in [name for name in weights if name.startswith("model.layers.0.")]:
            is_end = name.endswith(("o_proj.weight", "down_proj.weight"))
            copied = torch.zeros_like(weights[name]) if is_end else weights[name].clone()
            weights[name.replace("layers.0.", f"layers.{number}.")] = copied
    for file in path.iterdir():
        if file.suffix != ".safetensors" and file.is_file() and not file.name.endswith(".index.json"):
            shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": factor * own}))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def between_tokens(answers: Sequence[Answer]) -> float:
    """Return the mean seconds between two tokens of these answers."""
    gaps = [each.usage.completion_tokens - 1 for each in answers]
    return sum(each.ttit_seconds * gap for each, gap in zip(answers, gaps, strict=True)) / max(1, sum(gaps))


def targets_of(rows: Sequence[Row]) -> Iterator[Target]:
    """Yield the targets of rows: for the time of each workload, and for drafts accepted in a step of one sequence."""
    for row in rows:
        name = "{workload}, {ranks} x {variant}, batch {batch}".format(**row.keys)
        workload = str(row.keys["workload"])
        yield Target(f"{name}: over without drafts", row.value("drafts_ratio"), MOST_RATIO[workload], is_at_least=False)
        if workload in LEAST_ACCEPTED:
            yield Target(f"{name}: accepted a step", row.value("accepted"), LEAST_ACCEPTED[workload], is_at_least=True)


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "drafts",
        help="time between tokens with drafts of next tokens and without",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="builtin:smollm2", help="(default: builtin:smollm2)")
    parser.add_argument("--forms", default=FORMS, help=f"decode rings, RANKS:VARIANT with commas (default: {FORMS})")
    parser.add_argument("--batches", default="1,8", help="sequences at a time (default: 1,8)")
    parser.add_argument("--workloads", default=",".join(MOST_RATIO), help="some of document,edit,free (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each (default: 3)")
    parser.add_argument("--draft-model", default="", help="directory of a small model that drafts as well")
    parser.add_argument("--deepen", type=int, default=1, help="factor of its layers; the model as it is drafts")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    forms, batches = _forms(options.forms), [_whole("--batches", each) for each in options.batches.split(",")]
    num_rounds = _whole("--rounds", str(options.rounds))
    workloads = options.workloads.split(",")
    if unknown := sorted(set(workloads) - set(MOST_RATIO)):
        raise ConfigError(f"--workloads: {unknown[0]!r} is not allowed; give some of {', '.join(MOST_RATIO)}")
    text = document(TextCodec(resolve_model_path(options.model)))
    before, rows = load_now(), list[Row]()
    model, draft_model = options.model, options.draft_model
    with tempfile.TemporaryDirectory() as directory, progress_bar(len(forms) * len(batches) * len(workloads)) as tell:
        if options.deepen > 1:
            model, draft_model = str(deepened(resolve_model_path(model), Path(directory), options.deepen)), model
        for form in forms:
            service = Service(model, form, max(8, *batches), draft_model)
            try:
                for batch in batches:
                    for workload in workloads:
                        texts = batches_of(prompts(workload, text), batch)
                        rows.append(measure(service, form, workload, texts, num_rounds))
                        tell(f"{form.ranks}:{form.variant} {workload} {batch}")
            finally:
                service.close()
    report = Report(
        bench="drafts",
        settings=options.model,
        rows=tuple(rows),
        targets=tuple(targets_of(rows)),
        load=(before, load_now()),
    )
    if options.json:
        print(report.json())
    else:
        print_table(console(), report.table())
        print(*report.targets, LEGEND, told_load(report.load), sep="\n")
    return 0


def _forms(text: str) -> list[Form]:
    forms = []
    for each in text.split(","):
        ranks, _, variant = each.partition(":")
        if variant not in ("gather", "pass_q", "helix"):
            raise ConfigError(f"--forms: {each!r} is not allowed; give RANKS:VARIANT, such as 2:helix")
        forms.append(Form(_whole("--forms", ranks), variant))
    return forms


def _whole(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option}: {text!r} is not allowed; give whole numbers from 1 on")
    return int(text)
