"""Gateway process of a local cluster: `python -m ringserve.services.gateway --settings JSON`.

`ringserve up` starts it; users run `ringserve gateway` instead. A spare loads while another gateway serves. So the slow
imports run at the `niceness` in this process's settings.
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
    # Else numpy and tokenizers would start threads at import and keep them; a gateway needs none.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    beside_others(partial(import_module, "ringserve.services.gateway.process"), json.loads(settings)["niceness"])

    from ringserve.services.gateway.process import run_gateway
    from ringserve.services.gateway.settings import GatewaySettings

    return run_gateway(GatewaySettings.from_json(settings))


if __name__ == "__main__":
    raise SystemExit(main())
