"""`ringserve token`: a new bearer token, and the lines for the file of tenants."""

from __future__ import annotations

import argparse
import json

from ringserve.services.auth.tenants import hash_of, new_token
from ringserve.services.cli.options import Subcommands

EXAMPLE = """example:
  ringserve token --tenant acme

Give the token to the tenant and put the other lines into the file that auth.tokens names.
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "token", help="make a bearer token", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tenant", required=True, help="who will send it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    token = new_token()
    digest = hash_of(token)
    if options.json:
        print(json.dumps({"tenant": options.tenant, "token": token, "sha256": digest}))
    else:
        print(f"token, shown only now: {token}\n")
        print(f"tenants:\n  - name: {options.tenant}\n    tokens:\n      - {{sha256: {digest}}}")
    return 0
