"""proto/generate.py on a small contract of its own."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

GENERATE = Path(__file__).resolve().parents[2] / "proto" / "generate.py"
CONTRACT = """syntax = "proto3";
package ringserve.v1;
message Ping { string text = 1; }
service Echo { rpc Say(Ping) returns (stream Ping); }
"""


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_stubs", GENERATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    package = tmp_path / "ringserve" / "v1"
    package.mkdir(parents=True)
    (package / "echo.proto").write_text(CONTRACT)
    return tmp_path


def run(generate: ModuleType, root: Path, *options: str) -> int:
    status: int = generate.main(["--root", str(root), *options])
    return status


def test_generated_stubs_are_fresh_until_the_contract_changes(
    generate: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = root / "ringserve" / "v1"
    assert run(generate, root, "--check") == 1
    assert run(generate, root) == 0
    assert {path.name for path in package.glob("*.py*")} == {
        f"echo_pb2{part}" for part in (".py", ".pyi", "_grpc.py", "_grpc.pyi")
    }
    assert run(generate, root, "--check") == 0

    (package / "echo.proto").write_text(CONTRACT.replace("text", "words"))
    capsys.readouterr()
    assert run(generate, root, "--check") == 1
    named = capsys.readouterr().err
    assert "echo_pb2.py " in named
    assert "echo_pb2_grpc.py " not in named


def test_stubs_of_a_contract_that_is_gone_are_stale_and_removed(generate: ModuleType, root: Path) -> None:
    package = root / "ringserve" / "v1"
    (package / "gone.proto").write_text(CONTRACT.replace("Ping", "Pong").replace("Echo", "Gone"))
    assert run(generate, root) == 0
    (package / "gone.proto").unlink()
    assert run(generate, root, "--check") == 1
    assert run(generate, root) == 0
    assert list(package.glob("gone*")) == []


def test_a_broken_contract_is_refused_in_the_words_of_protoc(
    generate: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "ringserve" / "v1" / "echo.proto").write_text(CONTRACT.replace("string", "strng"))
    assert run(generate, root) == 2
    assert "strng" in capsys.readouterr().err
