"""Sampling options of commands that run turns, and the display of a turn's plan."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ringserve.client import Answer, Plan, Sampling
from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.offline.terminal import console, print_table, simple_table
from ringserve.services.offline.units import format_seconds
from ringserve.services.rpc.answer import plan_line

UNSIGNED = {"max_tokens": 32, "seed": 64, "top_k": 32, "min_tokens": 32, "n": 32, "logprobs": 32, "prompt_logprobs": 32}
"""Bits of the contract's unsigned fields."""
LEAST = {"n": 1, "max_tokens": 1}
"""Least values that make sense, where 0 does not."""


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options of every answer."""
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="new tokens at most (default: 64; of a chat: no limit)"
    )
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no stop within the first N tokens")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens (default: drawn)")
    parser.add_argument("--top-p", type=float, metavar="X", help="draw from the most likely tokens that make up X")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from the N most likely tokens")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="X", help="draw from tokens X times as likely as the likeliest"
    )
    parser.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="against tokens that the answer holds"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="the same for each time it holds them"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1: against tokens of prompt and answer"
    )
    parser.add_argument("--logit-bias", nargs="*", default=[], metavar="ID=X", help="add X to a token's logit")
    parser.add_argument("--stop", nargs="*", default=[], metavar="TEXT", help="end before any of these")
    parser.add_argument("--include-stop", action="store_true", help="show the stop text that ended the answer")
    parser.add_argument(
        "--stop-token-ids", type=int, nargs="*", default=[], metavar="ID", help="end after any of these"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end-of-sequence token")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a single turn."""
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to the prompt (default: 1)")
    parser.add_argument("--logprobs", type=int, metavar="N", help="with --json: of each token and the N most likely")
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens")


def add_form_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that hold an answer to a form; at most one of them is given."""
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json-schema", type=Path, metavar="FILE", help="answer with JSON that fits this schema")
    forms.add_argument("--json-object", action="store_true", help="answer with any JSON object")
    forms.add_argument("--regex", metavar="REGEX", help="answer with a text that matches")
    forms.add_argument("--choice", nargs="+", metavar="TEXT", help="answer with one of these")
    forms.add_argument("--grammar", type=Path, metavar="FILE", help="answer by this grammar, of Lark's form or GBNF")


def _form_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chosen form of the answer as a field of Sampling, if any. Raises InvalidRequest."""
    form = {name: given[name] for name in ("json_object", "regex", "choice") if given.get(name)}
    return form | {name: read_text(given[name]) for name in ("json_schema", "grammar") if given.get(name)}


def read_text(path: Path) -> str:
    """Read a file that a user names. Raises InvalidRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: byte {error.start + 1} is no UTF-8 text; convert it to UTF-8") from None


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Convert the options. Raises InvalidRequest for values that the contract's types cannot hold."""
    given = vars(options)
    for name, bits in UNSIGNED.items():
        value = given.get(name)
        least = LEAST.get(name, 0)
        if value is not None and not least <= value < 2**bits:
            bound = f"at least {least}" if value < least else f"at most {2**bits - 1}"
            raise InvalidRequest(f"--{name.replace('_', '-')}: {value} is not allowed; give {bound}")
    return Sampling(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        stop_token_ids=check_ids("--stop-token-ids", options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=dict(_bias(item) for item in options.logit_bias),
        min_tokens=options.min_tokens,
        stop=options.stop,
        include_stop_str_in_output=options.include_stop,
        n=given.get("n", 1),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        **_form_of(given),
    )


def check_ids(name: str, ids: object) -> list[int]:
    """Check a list of token ids. Raises InvalidRequest."""
    if not isinstance(ids, list):
        raise InvalidRequest(f"{name}: must be a list of token ids, e.g. [1, 2, 3]")
    for place, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            raise InvalidRequest(f"{name}[{place}]: {token!r} is no token id; allowed are integers from 0")
    return ids


def _bias(item: str) -> tuple[int, float]:
    token_id, _, bias = item.partition("=")
    try:
        return check_ids("--logit-bias", [int(token_id)])[0], float(bias)
    except ValueError:
        raise InvalidRequest(f"--logit-bias: {item!r} is not ID=X, e.g. 50256=-100") from None


def show_plan(answer: Answer) -> None:
    """Print the plan in a line, and a table of the compared prefill rings, on standard error."""
    line = plan_line(answer)
    if sys.stderr.isatty():
        line = textwrap.fill(line, shutil.get_terminal_size().columns, break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)
    if answer.plan.ring_alternatives:
        print_table(console(stderr=True), ring_table(answer.plan), num_keys=2)


def ring_table(plan: Plan) -> Table:
    """Return a table with a line for each ring, the quickest first; * marks the chosen one."""
    headers = ("", "ring", "cp", "tp", "predicted", "queue", "moving KV", "prefill", "hand-off", "stall")
    table = simple_table(*headers, left_aligned=headers[:2])
    for each in sorted(plan.ring_alternatives, key=lambda each: each.total_seconds):
        parts = (each.queue_seconds, each.move_seconds, each.prefill_seconds, each.handoff_seconds, each.stall_seconds)
        table.add_row(
            "*" if each.ring == plan.prefill_ring else "",
            each.ring,
            str(each.num_ranks),
            str(each.tp),
            *map(format_seconds, (each.total_seconds, *parts)),
        )
    return table
