"""Kernels for processors that this machine may not have: AVX-512, products of bfloat16 pairs, and tiles (AMX)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cp_core.attention.emulated import compile_emulated
from tests.programs import require
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[3]
FILES = ("test_native.py", "test_paged.py", "test_varlen.py", "test_backends.py", "../../workers/model/test_layers.py")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the emulated kernels are for x86")
def test_emulated_kernels_pass_the_tests_of_this_machines(tmp_path: Path) -> None:
    require("c++", "g++", "clang++")
    library = compile_emulated(tmp_path)
    files = [str((Path(__file__).parent / name).resolve()) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.cp_core.attention.emulated", *files]
    run = subprocess.run(
        # The other test is about machines without a library.
        [*command, "-p", "no:cacheprovider", "-k", "not without_a_compiled_library"],
        cwd=ROOT,
        env={**os.environ, "RINGSERVE_EMULATED": str(library)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
