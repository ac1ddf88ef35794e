"""`ringserve chat`: a conversation on the terminal, with the plan of every turn."""

from __future__ import annotations

import argparse
import sys
import uuid

from cp_core.errors import NotFound, RingserveError
from ringserve.v1 import inference_pb2
from services.cli.options import Subcommands, add_target_options, client_of
from services.cli.turns import add_sampling_options, sampling_of, show_plan
from services.rpc.answer import collect

EXAMPLE = """example:
  ringserve chat
  ringserve chat --target 127.0.0.1:50051 --system "Answer in one sentence." --max-tokens 128
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "chat", help="talk on the terminal", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    add_target_options(parser)
    parser.add_argument("--system", help="a system message to begin with")
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    conversation = f"chat-{uuid.uuid4().hex[:12]}"
    messages = [inference_pb2.ChatMessage(role="system", content=options.system)] if options.system else []
    sampling = sampling_of(options)
    with client_of(options) as client:
        print("An empty line or Ctrl-D ends the conversation.", file=sys.stderr)
        while line := _ask():
            asked = [*messages, inference_pb2.ChatMessage(role="user", content=line)]
            request = inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatInput(messages=asked), sampling_params=sampling, conversation_id=conversation
            )
            try:
                complete = collect(client.generate(request), lambda text: print(text, end="", flush=True))
            except RingserveError as error:
                print(f"\nringserve: {error}", file=sys.stderr)
                continue
            messages = [*asked, inference_pb2.ChatMessage(role="assistant", content=complete.text)]
            print()
            show_plan(complete)
        try:
            client.delete_conversation(conversation)
        except NotFound:
            return 0  # no turn was run
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
