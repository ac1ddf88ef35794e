"""`ringserve conversations`: list, show, fork and delete conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from ringserve.client import ConversationInfo, ConversationSummary
from ringserve.services.cli.command import Group, argument, command, option
from ringserve.services.cli.options import JsonFlag, TargetOptions
from ringserve.services.offline.terminal import listing, print_table


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    gateway: TargetOptions
    json: JsonFlag = False
    prefix: str = option("only ids with this prefix", default="")


@dataclass(frozen=True, kw_only=True)
class OneConversation:
    id: str = argument("the conversation")
    gateway: TargetOptions
    json: JsonFlag = False


@dataclass(frozen=True, kw_only=True)
class ForkOptions:
    source: str = argument("the conversation")
    new: str = argument("id of the new one")
    gateway: TargetOptions
    json: JsonFlag = False
    at_token: int | None = option("only the first N tokens (default: all)", default=None, min=1, max=2**32 - 1)


@command("ringserve conversations list --prefix tale")
def list_(options: ListOptions) -> int:
    with options.gateway.client() as client:
        found = list(client.list_conversations(options.prefix))
    if options.json:
        print(json.dumps({"conversations": [asdict(each) for each in found], "next_page_token": ""}))
    else:
        print_table(Console(), _table(found))
    return 0


@command("ringserve conversations show tale")
def show(options: OneConversation) -> int:
    with options.gateway.client() as client:
        _show(client.conversation(options.id), options.json)
    return 0


@command("ringserve conversations fork tale tale-2 --at-token 1000")
def fork(options: ForkOptions) -> int:
    with options.gateway.client() as client:
        client.fork_conversation(options.source, options.new, options.at_token)
        _show(client.conversation(options.new), options.json)
    return 0


@command("ringserve conversations delete tale-2")
def delete(options: OneConversation) -> int:
    with options.gateway.client() as client:
        client.delete_conversation(options.id)
    if options.json:
        print(json.dumps({}))
    return 0


conversations = Group(
    verbs={
        "list": ("every conversation, with the tokens that prefill and decode rings retain", list_),
        "show": ("location of a conversation's KV", show),
        "fork": ("begin a new conversation with the history of another", fork),
        "delete": ("delete a conversation and free its KV", delete),
    },
    examples=[*list_.examples, *show.examples, *fork.examples, *delete.examples],
)


def _table(conversations: Sequence[ConversationSummary]) -> Table:
    """Return a line for each conversation, with the running turns only if there are some."""
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


def _show(view: ConversationInfo, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(view)))
        return
    retained = ", ".join(
        f"{place.num_tokens} on {place.ring} ({'+'.join(str(rank.num_tokens) for rank in place.ranks)})"
        for place in view.placements
    )
    running = f", {view.running_request_id} running, {view.num_waiting} waiting" if view.running_request_id else ""
    print(
        f"{view.conversation_id}: {view.num_tokens} tokens, {view.num_turns} turns{running}; "
        f"KV retained (changes of its places: {view.epoch}): {retained or 'none'}"
    )
