"""What every process tells of itself, and the registry that its other series join."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics


def new_registry(role: str) -> CollectorRegistry:
    """A registry with memory, processor time and files of this process, and `ringserve_build_info`."""
    disable_created_metrics()  # they double the series of every counter and no dashboard reads them
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    labels = {"role": role, "version": package_version(), "python": platform.python_version()}
    build = Gauge("ringserve_build_info", "Always 1; what runs is in the labels.", labels.keys(), registry=registry)
    build.labels(**labels).set(1)
    return registry


def package_version() -> str:
    """Of ringserve, as it is installed."""
    try:
        return version("ringserve")
    except PackageNotFoundError:
        return "unknown"
