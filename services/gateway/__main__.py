"""Gateway process of a local cluster: `python -m ringserve.services.gateway --settings JSON`.

Users have `ringserve gateway`. A spare loads while another gateway serves, so what takes time is imported at the
`niceness` of its settings.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from ringserve.orchestration.tasks import beside_others


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a gateway. Return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ringserve.services.gateway")
    parser.add_argument("--settings", required=True, help="GatewaySettings as JSON")
    settings = parser.parse_args(arguments).settings
    # Threads that numpy and tokenizers would start then, and keep; a gateway needs none of them.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    beside_others(partial(import_module, "ringserve.services.gateway.process"), json.loads(settings)["niceness"])

    from ringserve.services.gateway.process import run_gateway
    from ringserve.services.gateway.settings import GatewaySettings

    return run_gateway(GatewaySettings.from_json(settings))


if __name__ == "__main__":
    raise SystemExit(main())
