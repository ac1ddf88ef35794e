"""Logs of every process: one human line an event, to standard error."""

from __future__ import annotations

import logging


def set_up_logs(process: str, level: int = logging.INFO) -> None:
    """Name the process in every line. Replaces what an earlier call set up."""
    line = f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(format=line, level=level, force=True)
    logging.getLogger("ray").setLevel(logging.WARNING)
