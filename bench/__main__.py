"""`python -m bench COMMAND`: the laboratory's commands.

If a command raises a RingserveError, its message goes to standard error and the exit status is 1. Nothing else is
touched here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ringserve.cp_core.errors import RingserveError

COMMANDS = {
    "attention": ("bench.rings.command", "one layer's attention by ring size, beside torch's own ring attention"),
    "prefill": ("bench.rings.command", "time to first token, beside transformers"),
    "decode": ("bench.rings.command", "time between tokens, beside transformers"),
    "steps": ("bench.rings.steps_command", "steps of one rank, by the form of its layers"),
    "kv-carrier": ("bench.rings.kv_carrier", "rate of KV between two processes, by each carrier"),
    "gateway": ("bench.service.command", "tokens a second that a gateway passes on"),
    "peers": ("bench.service.peers", "the service beside vLLM, llama.cpp and transformers on this machine"),
    "answers": ("bench.service.answers", "answers of models on a whole service beside transformers"),
    "drafts": ("bench.service.drafts", "time between tokens with drafts of next tokens and without"),
    "cost-model": ("bench.service.cost_model", "predicted and measured prefill of the whole service"),
    "scheduling": ("bench.service.prefill_scheduling", "worth of each part of the scheduling under load"),
    "router": ("bench.router.command", "turns a second that a router places"),
    "selection": ("bench.selection.command", "prefill algorithms on links of several rates: the loss of each policy"),
    "systems": ("bench.systems.command", "claims of the papers on their systems beside ours"),
    "papers": ("bench.papers.command", "published times of arXiv 2411.01783 beside predictions"),
    "needle": ("bench.needle.command", "find a code among up to a million tokens"),
    "bad-days": ("bench.chaos.bad_days", "a full disk, hostile clients, killed helpers of Ray"),
    "promises": ("bench.chaos.promises", "what the documents promise, tried sentence by sentence"),
    "soak": ("bench.service.soak", "memory of all processes under mixed load"),
    "chaos": ("bench.chaos.command", "break processes under load and check what clients see"),
    "gpu": ("bench.gpu.command", "all figures of one GPU beside their targets"),
}
"""Module of each command, imported only if that command is run, and what the command does."""
PROGRAM = "python -m bench"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    listed = "\n".join(f"  {name:12} {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure ringserve, break it, and compare it with the papers.",
        epilog=f"commands:\n{listed}\n\n'{PROGRAM} COMMAND --help' shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not given:
        parser.print_help()
        return 0
    if given[0] in COMMANDS:
        import_module(COMMANDS[given[0]][0]).add(parser.add_subparsers(metavar="COMMAND"))
    else:
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    options = parser.parse_args(given)
    try:
        return int(options.run(options))
    except RingserveError as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
