"""Compiles the kernels of CPUs when ringserve is installed or its wheel is built.

Without a C++ compiler nothing is compiled, and CPUs are served by torch's own kernels, slower.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("cp_core", "attention")
SOURCE = FOLDER / "native.cpp"
# Nothing of C++'s own library is needed. Products and sums may become one instruction.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast", "-Wno-psabi"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
BFLOAT16, AMX = ["-mavx512bf16"], ["-mamx-tile", "-mamx-bf16"]
X86 = {"avx512": [[*AVX512, *BFLOAT16, *AMX], [*AVX512, *BFLOAT16], AVX512], "avx2": [["-mavx2", "-mfma"]]}
"""Flags of each instruction set, the best first: a compiler that does not know some is given the next."""
COMPILERS = ("c++", "g++", "clang++")


class CustomBuildHook(BuildHookInterface[Any]):
    """Compiles one library for each instruction set of this machine's kind, beside the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is older than its source, and add it to a wheel, which is then one for this platform."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        try:
            libraries, reason = compile_kernels(root), "there is no C++ compiler"
        except RuntimeError as error:  # an old or a broken compiler is no reason to refuse the installation
            libraries, reason = [], str(error)
        if not libraries:
            self.app.display_warning(f"CPUs are served by torch's own kernels, slower: {reason}")
            return
        build_data["artifacts"].append(f"/{FOLDER}/native-*.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_kernels(root: Path) -> list[Path]:
    """Return the compiled libraries under `root`, [] without a compiler. Raises RuntimeError with its message."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None or not (root / SOURCE).is_file():
        return []
    kinds = X86 if platform.machine() in ("x86_64", "AMD64") else {"default": [[]]}
    libraries = {root / FOLDER / f"native-{kind}.so": list(flags) for kind, flags in kinds.items()}
    # The source and these flags say what a library is.
    newest = max((root / SOURCE).stat().st_mtime, Path(__file__).stat().st_mtime)
    missing = [each for each in libraries if not each.exists() or each.stat().st_mtime <= newest]
    while missing:
        running = []
        for library in missing:
            made = library.with_suffix(f".{os.getpid()}")
            command = [*compiler.split(), *FLAGS, *libraries[library].pop(0), "-o", str(made), str(root / SOURCE)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running.append((library, made, command, process))
        missing = []
        for library, made, command, process in running:
            said, _ = process.communicate()
            if not process.returncode:
                os.replace(made, library)
            elif libraries[library]:
                missing.append(library)
            else:
                raise RuntimeError(f"{' '.join(command)}:\n{said}")
    return list(libraries)
