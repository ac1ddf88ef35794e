"""Logs of every process: one human line an event, to standard error."""

from __future__ import annotations

import logging


def set_up_logs(process: str, level: str = "info") -> None:
    """Name the process in every line; nothing below `level` is written. Replaces what an earlier call set up."""
    line = f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(format=line, level=level.upper(), force=True)
    logging.getLogger("ray").setLevel(logging.WARNING)
