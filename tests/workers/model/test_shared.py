"""Memory that several processes hold once: who fills it, who can show it to others, and what becomes of it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringserve.cp_core.attention import native
from ringserve.workers.model import shared
from ringserve.workers.model.layers import PackedLinear, pack
from ringserve.workers.model.loading import LoadedModel, load_model
from ringserve.workers.model.shared import shared_bytes
from ringserve.workers.model.weights import is_mapped
from tests.forking import forking
from tests.programs import require
from tests.waiting import WAIT_SECONDS
from tests.workers.models import SHAPE

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no such memory on this system")


def hold(number: int, directory: str, told: Connection) -> None:
    """Want memory full of the number, say whether this process filled it and what it holds, and hold it."""
    tempfile.tempdir = directory

    def fill(memory: torch.Tensor) -> None:
        memory.fill_(number)
        told.send("filled")

    memory = shared_bytes("a test", 1000, fill)
    assert memory is not None
    told.send(memory.unique().tolist())
    told.recv()


class Other:
    """Another process, which wants memory full of its number and holds it until it ends."""

    def __init__(self, number: int, directory: Path) -> None:
        context = forking()
        self._told, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(number, str(directory), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def said(self) -> list[object]:
        """Return what it says until it holds the memory."""
        said: list[object] = []
        while not said or said[-1] == "filled":
            assert self._told.poll(WAIT_SECONDS), "it says nothing"
            said.append(self._told.recv())
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_SECONDS)
        self._told.close()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory for temporary files of this test and its processes; this process shows what it does in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shared, "_shown", {})
    yield tmp_path
    for fd in shared._shown.values():
        os.close(fd)


@pytest.fixture
def others(directory: Path) -> Iterator[list[Other]]:
    begun: list[Other] = []
    yield begun
    for each in begun:
        each.end()


def test_the_first_fills_it_and_any_that_lives_shows_it_to_others(directory: Path, others: list[Other]) -> None:
    others += [Other(5, directory)]
    assert others[0].said() == ["filled", [5]]
    others += [Other(6, directory)]
    assert others[1].said() == [[5]]
    others[0].end()
    own = shared_bytes("a test", 1000, lambda memory: memory.fill_(7))
    assert own is not None
    assert own.tolist() == [5] * 1000
    others[1].end()
    others += [Other(8, directory)]
    assert others[2].said() == [[5]], "from this process"
    (file,) = (directory / f"ringserve-shared-{os.getuid()}").iterdir()
    pids = [line.split()[0] for line in file.read_text().splitlines()]
    assert sorted(pids) == sorted([str(os.getpid()), str(others[2].process.pid)]), "those that have ended are forgotten"


def test_what_nobody_holds_any_more_is_filled_anew(directory: Path, others: list[Other]) -> None:
    others += [Other(5, directory)]
    others[0].said()
    others[0].end()
    own = shared_bytes("a test", 1000, lambda memory: memory.fill_(7))
    assert own is not None
    assert own.tolist() == [7] * 1000


def test_a_process_that_fills_some_removes_the_files_of_those_that_have_ended(
    directory: Path, others: list[Other]
) -> None:
    others += [Other(5, directory)]
    others[0].said()
    others[0].end()
    place = directory / f"ringserve-shared-{os.getuid()}"
    (left,) = place.iterdir()
    (place / "ringserve-of-another-program").write_text("what is this?\n")
    assert shared_bytes("b", 1000, lambda memory: memory.fill_(7)) is not None
    assert not left.exists()
    assert sorted(os.listdir(place))[1:] == ["ringserve-of-another-program"]
    assert shared_bytes("c", 1000, lambda memory: memory.fill_(7)) is not None
    assert len(os.listdir(place)) == 3, "both of this process stay"


def test_whoever_waits_for_a_file_that_is_removed_makes_it_anew(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "a-file"
    opened = threading.Event()
    found: list[bool] = []

    def wait_for_it() -> None:
        with shared._locked(path) as file:
            found.append(os.path.samestat(os.fstat(file.fileno()), path.stat()))

    def tried(*_: object) -> None:
        opened.set()
        real(*_)  # type: ignore[arg-type]

    real = fcntl.flock
    waiter = threading.Thread(target=wait_for_it)
    with shared._locked(path):
        monkeypatch.setattr(fcntl, "flock", tried)
        waiter.start()
        assert opened.wait(WAIT_SECONDS)
        path.unlink()
    waiter.join(WAIT_SECONDS)
    assert found == [True]


def test_of_several_at_a_time_one_fills_it(directory: Path, others: list[Other]) -> None:
    others += [Other(number, directory) for number in range(4)]
    said = [each.said() for each in others]
    (first,) = (lines for lines in said if lines[0] == "filled")
    assert all(lines[-1] == first[-1] for lines in said)


def test_nobody_can_change_it_for_others(directory: Path) -> None:
    one = shared_bytes("a test", 1000, lambda memory: memory.fill_(7))
    other = shared_bytes("a test", 1000, lambda memory: memory.fill_(8))
    assert one is not None
    assert other is not None
    one.fill_(1)
    assert other.tolist() == [7] * 1000
    (fd,) = shared._shown.values()
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"1", 0)


def test_other_keys_and_sizes_have_other_memory(directory: Path) -> None:
    made = [
        shared_bytes(key, size, lambda memory, size=size: memory.fill_(size % 251))  # type: ignore[misc]
        for key, size in (("a", 1000), ("a", 1001), ("b", 1000))
    ]
    assert all(memory is not None and (memory == len(memory) % 251).all() for memory in made)
    assert len(shared._shown) == 3


@pytest.mark.parametrize("lack", ["memory", "directory", "lock", "order"])
def test_without_it_there_is_none(lack: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "memory":
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    elif lack == "directory":
        (directory / "elsewhere").mkdir()
        (directory / f"ringserve-shared-{os.getuid()}").symlink_to(directory / "elsewhere")
    elif lack == "order":
        (directory / f"ringserve-shared-{os.getuid()}").mkdir()
        name = hashlib.sha256(b"a test 1000").hexdigest()[:32]
        (directory / f"ringserve-shared-{os.getuid()}" / f"ringserve-{name}").write_text("what is this?\n")
    else:
        monkeypatch.setattr(shared, "LOCK_SECONDS", 0.0)
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(BlockingIOError))
    assert shared_bytes("a test", 1000, lambda memory: memory.fill_(7)) is None
    linear = torch.nn.Linear(40, 70).requires_grad_(False)
    rows = torch.randn(3, 40)
    plain = linear(rows)
    pack(linear, key="a model")
    torch.testing.assert_close(linear(rows), plain)


def test_layers_that_are_packed_together_answer_as_each_alone(directory: Path) -> None:
    if native.library() is None:
        require("c++", "g++", "clang++")

    def made() -> torch.nn.Sequential:
        torch.manual_seed(3)
        parts = (torch.nn.Linear(40, 70), torch.nn.Linear(70, 33, bias=False), torch.nn.Linear(33, 1))
        return torch.nn.Sequential(*parts).requires_grad_(False)

    rows, alone, first, second = torch.randn(5, 40), made(), made(), made()
    pack(alone)
    for each in (first, second):
        pack(each, key="a model")
    assert len(shared._shown) == 1
    assert torch.equal(first(rows), alone(rows))
    assert torch.equal(second(rows), alone(rows))
    assert all(isinstance(each, PackedLinear) and each.packed.data_ptr() % 64 == 0 for each in first)


def embedding_of(model: LoadedModel) -> torch.Tensor:
    weight = model.model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def file_of(tensor: torch.Tensor) -> str:
    """Return the number of the file, with or without a name, that a tensor is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, number, *_ = line.split()
        start, stop = (int(each, 16) for each in addresses.split("-"))
        if start <= tensor.data_ptr() < stop:
            return number
    raise AssertionError("a tensor outside of this process's memory")


@pytest.mark.parametrize("with_head", [True, False])
def test_an_embedding_that_was_converted_is_in_memory_once(with_head: bool, directory: Path) -> None:
    """Its head is tied to it, packed or not. One in its file's own type is mapped from the file and stays there."""
    torch.manual_seed(7)
    path = directory / "model"
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": True})).save_pretrained(path)
    alone, *sharing = (load_model(path, "bfloat16", "cpu") for _ in range(3))
    alone.pack_weights(with_head=with_head)
    for each in sharing:
        each.pack_weights(with_head=with_head, is_shared=True)
    assert [is_mapped(embedding_of(each)) for each in (alone, *sharing)] == [False, True, True]
    wanted = embedding_of(alone)
    assert len({file_of(embedding_of(each)) for each in sharing}) == 1
    states = torch.randn(3, wanted.shape[1], generator=torch.Generator().manual_seed(3)).to(wanted.dtype)
    with torch.inference_mode():
        for each in sharing:
            assert torch.equal(embedding_of(each), wanted)
            assert torch.equal(each.logits(states), alone.logits(states))

    same = load_model(path, "float32", "cpu")
    before = embedding_of(same).data_ptr()
    same.pack_weights(with_head=with_head, is_shared=True)
    assert embedding_of(same).data_ptr() == before
    assert is_mapped(embedding_of(same))
