"""`ringserve generate`: run one turn."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ringserve.client import Message, Prompt
from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.turns import MAX_PRIORITY
from ringserve.services.cli.options import Subcommands, add_target_options, check_text, client_of
from ringserve.services.cli.turns import (
    add_answer_options,
    add_form_options,
    add_sampling_options,
    check_ids,
    read_text,
    sampling_of,
    show_plan,
)
from ringserve.services.rpc.answer import answer_dict, answers_dict
from ringserve.workers.protocol.prefill_steps import Algorithm

EXAMPLE = """example:
  ringserve generate --prompt "Once upon a time" --max-tokens 32
  ringserve generate --target 127.0.0.1:50051 --prompt-ids turn2.json --conversation c1 --max-tokens 16 --json
"""
MODES = ("auto", "append", "whole-history")


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "generate", help="run one turn", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    add_target_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; '-' reads standard input")
    prompt.add_argument("--prompt-ids", type=Path, metavar="FILE.json", help="the prompt as a JSON list of token ids")
    prompt.add_argument(
        "--messages", type=Path, metavar="FILE.json", help='chat messages: [{"role":..., "content":...}]'
    )
    parser.add_argument("--conversation", default="", metavar="ID", help="continue or begin this conversation")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="auto",
        help="prompt is the new text only, or the whole history (default: auto)",
    )
    add_sampling_options(parser)
    add_form_options(parser)
    add_answer_options(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the turn everywhere after this long")
    parser.add_argument("--wait", action="store_true", help="wait for the conversation's running turn")
    parser.add_argument(
        "--conversation-ttl",
        type=float,
        metavar="SECONDS",
        help="delete the conversation this long after its last use; 0: never",
    )
    parser.add_argument("--no-cache", action="store_true", help="share no KV of earlier prompts, and leave none")
    parser.add_argument(
        "--cache-key", default="", metavar="KEY", help="prefer the rings of earlier requests of this key"
    )
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="-100 to 100, higher first (default: 0)")
    parser.add_argument(
        "--algorithm",
        choices=[each.value for each in Algorithm],
        default="",
        help="algorithm of the prefill; the tokens are the same (default: chosen)",
    )
    parser.add_argument(
        "--max-loss", type=float, metavar="NATS", help="may be approximate, up to this loss, to be sooner; 0: exact"
    )
    parser.add_argument(
        "--max-ttft", type=float, metavar="SECONDS", help="may be approximate, to have the first token by then"
    )
    parser.add_argument("--request-id", default="", help="name the request, e.g. to abort it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.set_defaults(run=run)


def _priority(value: int) -> int:
    if abs(value) > MAX_PRIORITY:
        raise InvalidRequest(f"--priority: {value} is out of range; allowed are -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def _read_stdin() -> str:
    """Read the prompt. Raises InvalidRequest for bytes that are no text."""
    try:
        return check_text("standard input", sys.stdin.read())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input: byte {error.start + 1} is no UTF-8 text; convert it to UTF-8") from None


def _check_options(options: argparse.Namespace) -> None:
    """Check what needs no gateway. Raises InvalidRequest."""
    if options.timeout is not None and not options.timeout > 0:
        raise InvalidRequest(f"--timeout: {options.timeout:g} is not allowed; give seconds above 0")
    if options.mode == "append" and not options.conversation:
        raise InvalidRequest("--mode: append needs a conversation; give --conversation ID")


def run(options: argparse.Namespace) -> int:
    _check_options(options)
    is_streamed, prompt, sampling = not options.json and options.n == 1, _prompt(options), sampling_of(options)
    with client_of(options) as client:
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
            priority=_priority(options.priority),
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


def _prompt(options: argparse.Namespace) -> Prompt:
    if options.prompt is not None:
        return _read_stdin() if options.prompt == "-" else str(options.prompt)
    if options.prompt_ids is not None:
        return check_ids(str(options.prompt_ids), _read_json(options.prompt_ids))
    messages = _read_json(options.messages)
    if not isinstance(messages, list):
        raise InvalidRequest(f'{options.messages}: must be a list like [{{"role": "user", "content": "hello"}}]')
    return [Message.of(item, f"{options.messages}: message {place}") for place, item in enumerate(messages)]


def _read_json(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not valid JSON: {error}") from error
