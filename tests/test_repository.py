"""Rules for the repository as a whole that no tool checks."""

import ast
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).resolve().parent.parent
# Leaders, router and gateway load all of `orchestration` and these modules of the other layers.
TORCH_FREE = (
    "ringserve.cp_core.layout.shards",
    "ringserve.cp_core.errors",
    "ringserve.cp_core.layout.reshard",
    "ringserve.cp_core.cost.selector",
    "ringserve.cp_core.cost.model",
    "ringserve.cp_core.cost.fit",
    "ringserve.cp_core.cost.prefill",
    "ringserve.cp_core.cost.decode",
    "ringserve.workers.protocol.steps",
    "ringserve.workers.protocol.steps",
    "ringserve.workers.protocol.ranks",
    "ringserve.workers.model.info",
)


def sources(*suffixes: str) -> Iterator[Path]:
    """Yield hand-written files, without hidden folders, generated stubs, compiled kernels and a worktree's `.git`."""
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(name for name in names if name not in ("build", "dist", "__pycache__") and name[0] != ".")
        for name in sorted(files):
            if name.endswith(suffixes) and "_pb2" not in name and name != ".git" and not name.endswith(".so"):
                yield Path(folder, name)


def orchestration_modules() -> list[str]:
    return [module.name for module in pkgutil.walk_packages([str(ROOT / "orchestration")], "orchestration.")]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "proto")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )


def test_deciding_modules_load_without_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & sys.modules.keys()\n"
        "    if heavy: sys.exit(f'{name} loads {sorted(heavy)}')\n"
    )
    finished = run_python("-c", program, *TORCH_FREE, *orchestration_modules())
    assert finished.returncode == 0, finished.stderr


def test_committed_stubs_are_those_of_the_contract() -> None:
    finished = run_python("proto/generate.py", "--check")
    assert finished.returncode == 0, finished.stderr


MEANT = {
    (".png", Path("docs/images")),
    (".gz", Path("examples/traces")),
    (".safetensors", Path("tests/workers/model")),
}


def test_the_repository_holds_only_text_and_pictures_of_the_documents() -> None:
    """Packages, profiles and archives would enter the next commit.

    Traces of the examples and layers in few bits are meant.
    """
    found = [path.relative_to(ROOT) for path in sources("") if b"\0" in path.read_bytes()]
    assert [str(path) for path in found if (path.suffix, path.parent) not in MEANT] == []


def test_one_file_of_the_control_plane_makes_ray_actors() -> None:
    makers = [
        path.name for path in sources(".py") if path.is_relative_to(ROOT / "orchestration") and makes_actors(path)
    ]
    assert len(makers) <= 1, makers


def makes_actors(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "remote"
        and isinstance(node.value, ast.Name)
        and node.value.id == "ray"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (path.name, target)
        for path in sources(".md")
        for code in re.findall(r"`[^`]*`|^```.*?^```", path.read_text(), re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\bmake ([a-z-]+)", code)
    }
    assert ("README.md", "demo") in named
    assert {pair for pair in named if pair[1] not in targets} == set()


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in sources(".md")
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
        if not (path.parent / link).exists()
    ]
    assert broken == []


def test_the_picture_of_the_rooms_is_that_of_the_import_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = [contract for contract in contracts if contract["name"].startswith("Rooms of")]
    rooms = [(contract["containers"][0], contract["layers"]) for contract in named]
    _, _, picture = (ROOT / "docs/structure.md").read_text().partition("## Arrows between rooms")
    header, _, *rows = picture.split("```")[1].strip("\n").splitlines()
    starts = [match.start() for match in re.finditer(r"\w+", header)]
    shown = [[row[a:b].strip() for row in rows] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    drawn = {name: [cell for cell in column if cell] for name, column in zip(header.split(), shown, strict=True)}
    assert drawn == {container.rpartition(".")[2]: layers for container, layers in rooms}


def test_no_text_names_a_document_that_readers_do_not_have() -> None:
    known = {path.name for path in sources(".md")}
    unknown = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(".py", ".md", ".proto", ".toml", ".yaml", "Makefile")
        for name in re.findall(r"\b([\w-]+\.md)\b", path.read_text())
        if name not in known
    ]
    assert unknown == []


def test_no_text_names_a_path_of_a_private_machine() -> None:
    private = re.compile(r"(?<![\w.}>-])/(?:home|root|work|Users|mnt|opt)/\w+")
    found = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in (*sources(""), ROOT / ".ci/run", ROOT / ".pre-commit-config.yaml")
        if path.suffix != ".safetensors"
        for match in private.findall(path.read_text(errors="replace"))
    ]
    assert found == []


def test_every_declared_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    declared = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    others = [need for need in declared if need.name != "ringserve-client"]  # installed from proto/
    wrong = [str(need) for need in others if not need.specifier.contains(pins.get(canonicalize_name(need.name), "0"))]
    assert wrong == []
