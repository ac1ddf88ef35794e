"""Plugin of pytest: emulated kernels for AVX-512 and tiles, in place of those for this machine's processor.

    python -m pytest -p tests.cp_core.attention.emulated tests/cp_core/attention/test_native.py

RINGSERVE_EMULATED names a library that was compiled before; else one is compiled, for half a minute.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from hatch_build import COMPILERS, FLAGS
from ringserve.cp_core.attention import native
from ringserve.workers.model import layers
from tests.waiting import WAIT_SECONDS

SOURCE = Path(__file__).with_suffix(".cpp")


def compile_emulated(directory: Path) -> Path:
    """Compile the library into a directory; return its path."""
    made = directory / "native-emulated.so"
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)))
    # Less of a compiler's work, which would take two minutes, but products and sums are one instruction.
    flags = [*FLAGS, "-O1", "-fexpensive-optimizations", "-mavx2", "-mfma"]
    command = [*shlex.split(compiler), *flags, str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True, timeout=WAIT_SECONDS)
    return made


@cache
def library() -> ctypes.CDLL | None:
    """Return the emulated library, as `native.library` returns this machine's."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.environ.get("RINGSERVE_EMULATED") or compile_emulated(Path(directory))
        found = native.load_file(Path(path))
    assert found is not None, f"{path} is of another version"
    assert found.ringserve_use_tiles(True), "it has tiles"
    assert found.ringserve_use_pairs(True), "it multiplies pairs of bfloat16 numbers"
    return found


def pytest_configure() -> None:
    """Let all code take the emulated library for this machine's."""
    patch = pytest.MonkeyPatch()
    patch.setattr(native, "library", library)
    patch.setattr(layers, "multiplies_bfloat16", lambda: True)
