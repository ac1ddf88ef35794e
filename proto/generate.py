"""Generate the Python stubs of `proto/ringserve/v1/*.proto`, or with --check prove that the committed ones are fresh.

Four files a contract: messages (`_pb2.py`) and services (`_pb2_grpc.py`), each with its types (`.pyi`). The types are
mypy-protobuf's: protoc has none for services, and those it has for messages fail strict type checking.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
PACKAGE = Path("ringserve/v1")


class GenerationFailed(Exception):
    """A tool is missing or refused the contract. The message holds the tool's own words."""


def generate(root: Path, output: Path) -> None:
    """Write the stubs of every contract below `root / PACKAGE` to `output / PACKAGE`. Raises GenerationFailed."""
    contracts = sorted(str(path.relative_to(root)) for path in (root / PACKAGE).glob("*.proto"))
    if not contracts:
        raise GenerationFailed(f"no .proto file in {root / PACKAGE}")
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", *find_plugins()),
        *("-I", str(root), "-I", str(resources.files("grpc_tools") / "_proto")),
        *(f"--python_out={output}", f"--grpc_python_out={output}"),
        *(f"--mypy_out=quiet:{output}", f"--mypy_grpc_out=quiet:{output}", *contracts),
    ]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    if finished.returncode:
        raise GenerationFailed(finished.stderr.strip())


def find_plugins() -> list[str]:
    """Options that name mypy-protobuf's plugins."""
    return [
        f"--plugin={name}={find_tool(name, 'mypy-protobuf')}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]


def find_tool(name: str, package: str) -> str:
    """Path of a program beside this interpreter, its environment activated or not. Raises GenerationFailed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise GenerationFailed(f"{name} is not installed: pip install {package}")
    return found


def stubs(root: Path) -> dict[str, bytes]:
    """Name and content of every generated file below `root`."""
    return {path.name: path.read_bytes() for path in sorted((root / PACKAGE).glob("*_pb2*.py*"))}


def find_stale(root: Path) -> list[str]:
    """Names of stubs that are missing, out of date, or left over from a contract that is gone."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(root, Path(scratch))
        fresh, committed = stubs(Path(scratch)), stubs(root)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the stale files, if any")
    parser.add_argument("--root", type=Path, default=PROTO_ROOT, help="the folder that holds ringserve/v1")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    try:
        stale = find_stale(root)
        if stale and not options.check:
            for name in stale:
                (root / PACKAGE / name).unlink(missing_ok=True)
            generate(root, root)
    except GenerationFailed as failure:
        print(f"cannot generate stubs: {failure}", file=sys.stderr)
        return 2
    if not options.check:
        print(f"written: {', '.join(stale)}" if stale else "stubs are fresh")
        return 0
    for name in stale:
        print(f"stale: {root / PACKAGE / name} (run `make proto`)", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
