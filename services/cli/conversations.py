"""`ringserve conversations`: list, show, fork and delete conversations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ringserve.client import ConversationInfo, ConversationSummary
from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.cli.options import Subcommands, add_target_options, client_of
from ringserve.services.offline.terminal import listing, print_table

EXAMPLE = """example:
  ringserve conversations list --prefix tale
  ringserve conversations show tale
  ringserve conversations fork tale tale-2 --at-token 1000
  ringserve conversations delete tale-2
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "conversations",
        help="list, show, fork and delete conversations",
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    listing = _verb(verbs, "list", "every conversation, with the tokens that prefill and decode rings retain", run_list)
    listing.add_argument("--prefix", default="", help="only ids with this prefix")
    show = _verb(verbs, "show", "location of a conversation's KV", run_show)
    show.add_argument("id")
    fork = _verb(verbs, "fork", "begin a new conversation with the history of another", run_fork)
    fork.add_argument("source")
    fork.add_argument("new")
    fork.add_argument("--at-token", type=int, metavar="N", help="only the first N tokens (default: all)")
    delete = _verb(verbs, "delete", "delete a conversation and free its KV", run_delete)
    delete.add_argument("id")


def _verb(verbs: Subcommands, name: str, summary: str, run: object) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name, help=summary, epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter, description=summary
    )
    add_target_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run_list(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        found = list(client.list_conversations(options.prefix))
    if options.json:
        _print_json({"conversations": [asdict(each) for each in found], "next_page_token": ""})
        return 0
    print_table(Console(), _table(found))
    return 0


def _table(conversations: Sequence[ConversationSummary]) -> Table:
    """Return a line for each conversation, with the running turns only where there are some."""
    is_running = any(item.running_request_id for item in conversations)
    headers = ("conversation", "tokens", "turns", "idle", "expires", "KV prefill/decode")
    table = listing(*headers, *(["running"] if is_running else []))
    for item in conversations:
        waiting = f" +{item.num_waiting} waiting" if item.num_waiting else ""
        cells = (
            str(item.num_tokens),
            str(item.num_turns),
            f"{item.idle_seconds:.0f} s",
            f"{item.ttl_seconds:g} s" if item.ttl_seconds else "never",
            f"{item.kept_on_prefill}/{item.kept_on_decode}",
        )
        table.add_row(item.conversation_id, *cells, *([item.running_request_id + waiting] if is_running else []))
    return table


def run_show(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        _show(client.conversation(options.id), options.json)
    return 0


def run_fork(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        client.fork_conversation(options.source, options.new, _count(options.at_token))
        _show(client.conversation(options.new), options.json)
    return 0


def run_delete(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        client.delete_conversation(options.id)
    if options.json:
        _print_json({})
    return 0


def _count(value: int | None) -> int | None:
    """Check a count against the contract's type. Raises InvalidRequest."""
    if value is not None and not 0 < value < 2**32:
        raise InvalidRequest(f"--at-token: {value} is out of range; allowed are 1 to {2**32 - 1}")
    return value


def _show(view: ConversationInfo, as_json: bool) -> None:
    if as_json:
        _print_json(asdict(view))
        return
    retained = ", ".join(
        f"{place.num_tokens} on {place.ring} ({'+'.join(str(rank.num_tokens) for rank in place.ranks)})"
        for place in view.placements
    )
    running = f", {view.running_request_id} running, {view.num_waiting} waiting" if view.running_request_id else ""
    print(
        f"{view.conversation_id}: {view.num_tokens} tokens, {view.num_turns} turns{running}; "
        f"retained at epoch {view.epoch}: {retained or 'nothing'}"
    )


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values))
