"""`ringserve generate`: run one turn.

It calls a gateway and keeps nothing. `ringserve chat` uses its sampling options and its display of plans.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from typer import BadParameter

from ringserve.client import Answer, Message, Plan, Prompt, Sampling
from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.turns import MAX_PRIORITY
from ringserve.services.cli.command import check_text, command, flag, one_of, option
from ringserve.services.cli.options import TargetOptions, read_text
from ringserve.services.offline.terminal import console, print_table, simple_table
from ringserve.services.offline.units import format_seconds
from ringserve.services.rpc.answer import answer_dict, answers_dict
from ringserve.workers.protocol.steps import Algorithm

UINT32 = 2**32 - 1
"""Largest value of an unsigned field of the gRPC contract; seeds have 64 bits."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling options that `generate` and `chat` share; each has a --max-tokens of its own."""

    min_tokens: int = option("no stop within the first N tokens", default=0, show_default=False)
    temperature: float = option("0 is greedy", default=0.0)
    seed: int | None = option("same seed, same tokens (default: drawn)", default=None)
    top_p: float | None = option("draw from the most likely tokens, whose probabilities sum to X", default=None)
    top_k: int = option("draw from the N most likely tokens", default=0, show_default=False)
    min_p: float = option(
        "draw from tokens at least X times as likely as the likeliest", default=0.0, show_default=False
    )
    presence_penalty: float = option(
        "subtract X from the logits of the answer's tokens", default=0.0, show_default=False
    )
    frequency_penalty: float = option("the same for each occurrence of the token", default=0.0, show_default=False)
    repetition_penalty: float | None = option("above 1: against tokens of prompt and answer", default=None)
    logit_bias: list[str] = option("add X to a token's logit", "ID=X ...", [])
    stop: list[str] = option("end before any of these", "TEXT ...", [])
    include_stop: bool = flag("show the stop text that ended the answer")
    stop_token_ids: list[int] = option("end after any of these", "ID ...", [])
    ignore_eos: bool = flag("do not end at the model's end-of-sequence token")

    def sampling(self, **others: Any) -> Sampling:
        """Return the Sampling of these options and of `others`, further fields of it.

        Raises InvalidRequest for values out of bounds.
        """
        for name, least, most in (
            ("max_tokens", 1, UINT32),
            ("min_tokens", 0, UINT32),
            ("top_k", 0, UINT32),
            ("n", 1, UINT32),
            ("logprobs", 0, UINT32),
            ("prompt_logprobs", 0, UINT32),
            ("seed", 0, 2**64 - 1),
        ):
            value = getattr(self, name, others.get(name))
            if value is not None and not least <= value <= most:
                key = name.replace("_", "-")
                raise InvalidRequest(f"--{key}: {value} is out of range; allowed are {least} to {most}")
        return Sampling(
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=check_ids("--stop-token-ids", self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(_bias(item) for item in self.logit_bias),
            min_tokens=self.min_tokens,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop,
            **others,
        )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: str | None = option("the prompt; '-' reads standard input", default=None)
    prompt_ids: Path | None = option("the prompt as a JSON list of token ids", default=None)
    messages: Path | None = option('chat messages, as JSON: [{"role": ..., "content": ...}]', default=None)
    gateway: TargetOptions
    conversation: str = option("continue or begin this conversation", "ID", "")
    mode: str = one_of(
        "the prompt is the new text only, or the whole history", ("auto", "append", "whole-history"), "auto"
    )
    max_tokens: int = option("new tokens at most", default=64)
    sampling: SamplingOptions
    json_schema: Path | None = option("answer with JSON that fits this schema", default=None)
    json_object: bool = flag("answer with any JSON object")
    regex: str = option("answer with a text that matches", "REGEX", "")
    choice: list[str] = option("answer with one of these", "TEXT ...", [])
    grammar: Path | None = option("answer by this grammar, of Lark's form or GBNF", default=None)
    n: int = option("answers to the prompt", default=1)
    logprobs: int | None = option("with --json: log probabilities of each token and of the N most likely", default=None)
    prompt_logprobs: int | None = option("the same for the prompt's tokens", default=None)
    timeout: float | None = option("end the turn everywhere after this long", "SECONDS", None)
    wait: bool = flag("wait for the conversation's running turn")
    conversation_ttl: float | None = option(
        "delete the conversation this long after its last use; 0: never", "SECONDS", None
    )
    no_cache: bool = flag("share no KV of earlier prompts, and leave none")
    cache_key: str = option("prefer the rings of earlier requests of this key", "KEY", "")
    priority: int = option("higher first", default=0, min=-MAX_PRIORITY, max=MAX_PRIORITY)
    algorithm: str = one_of(
        "algorithm of the prefill; the tokens are the same (default: chosen)", [each.value for each in Algorithm], ""
    )
    max_loss: float | None = option(
        "allow an approximate prefill with this loss at most, if faster; 0: exact", "NATS", None
    )
    max_ttft: float | None = option("allow an approximate prefill, if no exact one is in time", "SECONDS", None)
    request_id: str = option("name the request, e.g. to abort it", "ID", "")
    json: bool = flag("print one JSON object instead of the text")

    def __post_init__(self) -> None:
        """Check the options that need no gateway. Raises BadParameter, InvalidRequest."""
        if [self.prompt, self.prompt_ids, self.messages].count(None) != 2:
            raise BadParameter("--prompt, --prompt-ids, --messages: give exactly one of them")
        if len(self.form()) > 1:
            raise BadParameter("--json-schema, --json-object, --regex, --choice, --grammar: give one of them at most")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidRequest(f"--timeout: {self.timeout:g} is not allowed; give seconds above 0")
        if self.mode == "append" and not self.conversation:
            raise InvalidRequest("--mode: append needs a conversation; give --conversation ID")

    def form(self) -> dict[str, Any]:
        """Return the options that constrain the answer's form, by their names in Sampling; files are not read yet."""
        names = ("json_schema", "json_object", "regex", "choice", "grammar")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@command(
    'ringserve generate --prompt "Once upon a time" --max-tokens 32',
    "ringserve generate --target 127.0.0.1:50051 --prompt-ids turn2.json --conversation c1 --max-tokens 16 --json",
)
def generate(options: GenerateOptions) -> int:
    form = {name: read_text(value) if isinstance(value, Path) else value for name, value in options.form().items()}
    is_streamed, prompt = not options.json and options.n == 1, _prompt(options)
    sampling = options.sampling.sampling(
        max_tokens=options.max_tokens,
        n=options.n,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        **form,
    )
    with options.gateway.client() as client:
        stream = client.stream(
            prompt,
            sampling=sampling,
            request_id=options.request_id,
            conversation_id=options.conversation,
            mode=options.mode.replace("-", "_"),
            conversation_ttl_seconds=options.conversation_ttl,
            wait=options.wait,
            no_cache=options.no_cache,
            cache_key=options.cache_key,
            priority=options.priority,
            algorithm=options.algorithm,
            max_loss=options.max_loss,
            max_ttft=options.max_ttft,
            timeout=options.timeout,
        )
        for piece in stream:
            if is_streamed:
                print(piece.text, end="", flush=True)
        answers = stream.answer().choices
    if options.json:
        print(json.dumps(answer_dict(answers[0]) if options.n == 1 else answers_dict(answers)))
        return 0
    for answer in answers:
        print("" if is_streamed else f"[{answer.index + 1} of {len(answers)}] {answer.text}")
        show_plan(answer)
    return 0


def _prompt(options: GenerateOptions) -> Prompt:
    if options.prompt is not None:
        return _read_stdin() if options.prompt == "-" else str(options.prompt)
    if options.prompt_ids is not None:
        return check_ids(str(options.prompt_ids), _read_json(options.prompt_ids))
    assert options.messages is not None, "exactly one of the three is given"
    messages = _read_json(options.messages)
    if not isinstance(messages, list):
        raise InvalidRequest(f'{options.messages}: must be a list like [{{"role": "user", "content": "hello"}}]')
    return [Message.of(item, f"{options.messages}: message {place}") for place, item in enumerate(messages)]


def _read_json(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not valid JSON: {error}") from error


def _read_stdin() -> str:
    """Read the prompt. Raises InvalidRequest for bytes that are no text."""
    try:
        return check_text("standard input", sys.stdin.read())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input: byte {error.start + 1} is no UTF-8 text; convert it to UTF-8") from None


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


WORTH_SHOWING = 0.05
"""A correction is shown if it changes the prediction by more than this share."""


def show_plan(answer: Answer) -> None:
    """Print how an answer was computed, and the compared prefill rings, as tables on standard error."""
    rows = list(_plan_rows(answer))
    indent = 2 + max(len(name) for name, _ in rows)
    for name, value in rows:
        line = f"{name:{indent}}{value}"
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            line = textwrap.fill(line, columns, subsequent_indent=" " * indent, break_on_hyphens=False)
        print(line, file=sys.stderr, flush=True)
    if answer.plan.ring_alternatives:
        print_table(console(stderr=True), ring_table(answer.plan), num_keys=2)


def _plan_rows(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield the figures of a finished turn with their names, and its reason and losses if there are any."""
    plan = answer.plan
    predicted = format_seconds(plan.predicted_prefill_seconds)
    keys = f", with {plan.sparse.keep:g} of other ranks' keys" if plan.sparse else ""
    yield "algorithm", plan.algorithm + keys
    drafted = f", {answer.usage.accepted_draft_tokens} of them drafted" if answer.usage.accepted_draft_tokens else ""
    answered = f"{answer.usage.completion_tokens} answered{drafted} ({answer.finish_reason})"
    yield "tokens", f"{plan.new_tokens} new, {plan.cached_tokens} cached, {answered}"
    yield "rings", f"{plan.prefill_ring} -> {plan.decode_ring}"
    yield "TTFT", format_seconds(answer.ttft_seconds)
    yield "prefill", f"{format_seconds(plan.prefill_seconds)}, predicted {predicted}"
    yield "TTIT", format_seconds(answer.ttit_seconds)
    others = (f"{each.algorithm} {format_seconds(each.predicted_prefill_seconds)}" for each in plan.alternatives)
    if ways := ", ".join(others):
        yield "predicted", ways
    if plan.reason:
        yield "why", plan.reason
    if plan.correction and abs(plan.correction - 1.0) > WORTH_SHOWING:
        yield "corrected", f"by {plan.correction:.2f}, since the latest turns like this one took longer or shorter"
    for remark in plan.remarks:
        yield "remark", remark
    for name in dict.fromkeys(each.fallback for each in plan.chunks if each.fallback):
        yield "layout", f"{name} for lack of room"
    for each in plan.failovers:
        place = f"{each.prefill_ring} -> {each.decode_ring} after {format_seconds(each.lost_seconds)}"
        yield f"lost {each.role}", f"after {each.after_tokens} tokens ({each.cause}), went on at {place}"


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
