"""Data from the network is never unpickled, evaluated or loaded as code: a check of the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_repository import ROOT

PACKAGES = ("cp_core", "workers", "orchestration", "services", "bench")
CODE_IN_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
"""Modules whose data may run code on reading."""
OWN_CHILDREN = {
    "services/cli/simulate.py",
    "bench/gpu/command.py",
    "bench/gpu/rank.py",
    "bench/rings/kv_carrier.py",
    "bench/rings/ring_processes.py",
    "bench/router/restart.py",
    "bench/selection/measure.py",
    "bench/service/gateway.py",
}
"""Files of commands that talk to their own child processes by pipes."""
CALLS = {
    "torch.load": "use safetensors, or weights_only=True",
    "yaml.load": "use yaml.safe_load",
    "yaml.unsafe_load": "use yaml.safe_load",
    "yaml.full_load": "use yaml.safe_load",
    "eval": "parse it",
    "exec": "parse it",
}


def faults(path: str, text: str) -> Iterator[str]:
    """Yield each place in a source that reads data as code, with its line."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                modules = {name.name for name in names}
            case ast.ImportFrom(module=module, names=names):
                modules = {module or ""} | {f"{module}.{name.name}" for name in names}
            case ast.Call(func=func, keywords=keywords):
                modules = set()
                name = ast.unparse(func)
                only_weights = any(
                    each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in keywords
                )
                if name in CALLS and not (name == "torch.load" and only_weights):
                    yield f"{path}:{node.lineno}: {name}; {CALLS[name]}"
                if name.endswith(("_object_list", "_object")) and "distributed" in name:
                    yield f"{path}:{node.lineno}: {name} sends pickles"
                for keyword in keywords:
                    if keyword.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(keyword.value) != "False":
                        yield f"{path}:{node.lineno}: {keyword.arg}"
            case _:
                continue
        for module in modules if path not in OWN_CHILDREN else ():
            if module.split(".")[0] in CODE_IN_DATA or module == "ray.cloudpickle":
                yield f"{path}:{node.lineno}: {module} reads data that may run code"
            if module.startswith("multiprocessing"):
                yield f"{path}:{node.lineno}: {module} sends pickles"


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_package_reads_data_that_may_run_code() -> None:
    paths = sources()
    assert len(paths) > 100
    found = [fault for path in paths for fault in faults(str(path.relative_to(ROOT)), path.read_text())]
    assert found == []


def test_the_exceptions_are_still_needed() -> None:
    for name in OWN_CHILDREN:
        assert list(faults("elsewhere.py", (ROOT / name).read_text())), f"{name} needs no exception"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "def f():\n    import marshal",
        "import torch\nx = torch.load('a', weights_only=False)",
        "import numpy\nnumpy.load('a', allow_pickle=True)",
        "torch.distributed.broadcast_object_list(x)",
        "from multiprocessing.connection import Client",
        "yaml.load(text)",
        "eval(text)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_look_finds_what_it_is_for(text: str) -> None:
    assert len(list(faults("workers/x.py", text))) >= 1
