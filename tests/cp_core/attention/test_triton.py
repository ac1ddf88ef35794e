"""Triton's kernels without a GPU: under the interpreter against the oracle, and compiled for two kinds of GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[3]


def run_alone(*arguments: str, **environment: str) -> None:
    """Run python in a process of its own: the first import of Triton decides for a process how kernels run."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout[-6000:]}\n{process.stderr[-2000:]}"


def test_every_kernel_matches_the_oracle_under_the_interpreter() -> None:
    cases = Path(__file__).with_name("triton_cases.py")
    quiet = ("-q", "-p", "no:cacheprovider", "--noconftest")
    run_alone("-m", "pytest", *quiet, str(cases), TRITON_INTERPRET="1", PYTHONHASHSEED="0")


def test_every_kernel_compiles_for_the_gpus_that_are_served(tmp_path: Path) -> None:
    """Down to machine code, by the compiler in Triton's package, with the tiles of two head dimensions."""
    run_alone("-m", "tests.cp_core.attention.triton_compiling", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
