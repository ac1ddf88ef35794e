"""System programs that some tests run. `make programs` installs them on Debian (`tests/system_programs.sh`)."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

# Debian's package of each.
PACKAGES = {
    "c++": "g++",
    "chromium": "chromium",
    "curl": "curl",
    "ip": "iproute2",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "tc": "iproute2",
}
MISSING = re.compile(r"([\w+]+) is not installed: ")


def require(program: str, *others: str) -> str:
    """Return the path of a program, or of another that does the same; skip the test if none is installed.

    For example `require("chromium", "google-chrome")`.
    """
    for name in (program, *others):
        if path := shutil.which(name):
            return path
    package = PACKAGES[program]
    pytest.skip(f"{program} is not installed: `make programs`, or apt-get install --no-install-recommends {package}")


def count_missing(skipped: Iterable[pytest.TestReport]) -> str:
    """Return how many of these tests were skipped for which programs, in one line; empty if none was."""
    found = (MISSING.search(str(report.longrepr)) for report in skipped)
    counts = Counter(match[1] for match in found if match)
    if not counts:
        return ""
    programs = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
    return f"{counts.total()} tests skipped for programs that are not installed: {programs}; see `make programs`"
