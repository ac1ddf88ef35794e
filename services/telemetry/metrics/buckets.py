"""Upper bounds of histograms, in seconds unless named otherwise. Those of vLLM where it has the same series."""

from __future__ import annotations

TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
INTER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
REQUEST = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
"""Whole requests and their parts: queue, prefill, migration, decode."""
CONTROL = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""What the control plane adds to a turn."""
RATIO = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Predicted over actual: 1 is a perfect prediction."""
TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6, 2e6)
