"""`ringserve token`: a new bearer token, and the lines for the file of tenants."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ringserve.services.auth.tenants import hash_token, new_token
from ringserve.services.cli.command import command, option
from ringserve.services.cli.options import JsonFlag


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    tenant: str = option("who will send it", "NAME")
    json: JsonFlag = False


@command(
    "ringserve token --tenant acme",
    notes="Give the token to the tenant and put the other lines into the file that auth.tokens names.",
)
def token(options: TokenOptions) -> int:
    secret = new_token()
    digest = hash_token(secret)
    if options.json:
        print(json.dumps({"tenant": options.tenant, "token": secret, "sha256": digest}))
    else:
        print(f"token, shown only now: {secret}\n")
        print(f"tenants:\n  - name: {options.tenant}\n    tokens:\n      - {{sha256: {digest}}}")
    return 0
