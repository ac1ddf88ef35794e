"""Starting and stopping a cluster: what cannot work is refused at once, and nothing is ever left behind."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import grpc
import psutil
import pytest

from ringserve.orchestration.ring.actors import RANK_NICENESS
from ringserve.services.cluster import fork_server
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, ids, options_of, wait_until
from tests.services.e2e.terminal import Foreground, started
from tests.waiting import START_SECONDS
from tests.workers.models import random_tokens


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def edited_model(tmp_path: Path, model_path: Path) -> Callable[..., Path]:
    """Copy the model with some keys of its configuration changed."""

    def edit(**changes: object) -> Path:
        target = Path(shutil.copytree(model_path, tmp_path / "edited"))
        config = json.loads((target / "config.json").read_text()) | changes
        (target / "config.json").write_text(json.dumps(config))
        return target

    return edit


def refused(run: Callable[..., CompletedProcess[str]], *arguments: str) -> str:
    """Run a command that must fail before it starts anything (it would print so); return its one sentence."""
    finished = run(*arguments)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr.startswith("ringserve: ")
    assert len(finished.stderr.splitlines()) == 1, finished.stderr
    return finished.stderr


def small(model_path: Path) -> list[str]:
    return [*options_of(model_path), "--set", "prefill.cp=1", "--set", "decode.cp=1"]


def test_up_refuses_a_port_that_is_taken_in_the_foreground_too(ringserve: Ringserve, port_in_use: int) -> None:
    taken = f"127.0.0.1:{port_in_use}"
    ports = (f"gateway.listen={taken}", "gateway.metrics=127.0.0.1:0", "gateway.http=")
    settings = [word for port in ports for word in ("--set", port)]
    said = refused(ringserve.run_process, "up", "--name", "wrong", *settings)
    assert f"gateway.listen: cannot listen on {taken}" in said


MODELS: dict[str, dict[str, object]] = {
    "model": {"attn_logit_softcapping": 50.0},
    "variant": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4},
}


@pytest.mark.parametrize("what", ["port", "directory", "model", "variant", "key", "value", "heads", "file"])
def test_up_refuses_at_once_what_cannot_work(
    ringserve: Ringserve, port_in_use: int, edited_model: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    """A cluster that is to run in the background is refused by this process, or by its own, whose words are told."""
    taken, model = f"127.0.0.1:{port_in_use}", edited_model(**MODELS.get(what, {}))
    wrong = {
        "port": (["--set", f"gateway.listen={taken}"], f"gateway.listen: cannot listen on {taken}"),
        "directory": (["--set", f"model.path={tmp_path}/none"], f"{tmp_path}/none' is not a directory"),
        "model": (["--set", f"model.path={model}"], "a soft cap on attention logits"),
        "variant": (
            ["--set", f"model.path={model}", "--set", "decode.variant=helix"],
            "decode.variant: helix is not allowed for edited, which has attention sinks",
        ),
        "key": (["--set", "prefill.speed=9"], "prefill.speed: there is no such key"),
        "value": (["--set", "decode.cp=none"], "decode.cp: 'none'"),
        "heads": (
            ["--set", "decode.tp=3"],
            "decode.tp: 3 does not divide the 2 KV heads of builtin:tiny; allowed are 1, 2",
        ),
        "file": (["--ready-file", f"{tmp_path}/none/ready.json"], "--ready-file"),
    }
    arguments, said = wrong[what]
    ports = ["--set", "gateway.metrics=127.0.0.1:0", "--set", "gateway.http="]
    if what != "port":
        ports += ["--set", "gateway.listen=127.0.0.1:0"]
    assert said in refused(ringserve.run, "up", "--detach", "--name", "wrong", *ports, *arguments)
    assert not (ringserve.directory / "state" / "wrong.json").exists()


def test_a_second_cluster_of_the_same_name_is_refused(cluster: Cluster) -> None:
    said = refused(
        cluster.ringserve.run, "up", "--name", cluster.name, "--detach", "--set", "gateway.listen=127.0.0.1:0"
    )
    assert f"'shared' runs already (pid {cluster.pid}, gateway {cluster.gateway})" in said


def test_processes_show_what_they_are(cluster: Cluster) -> None:
    """Ray appends the method that an actor runs to its title."""
    titles = {" ".join(each.cmdline()): each for each in psutil.Process(cluster.pid).children(recursive=True)}
    actors = {
        title.strip().removeprefix("ray::").partition(".")[0]: each
        for title, each in titles.items()
        if title.startswith("ray::")
    }
    ranks = {f"{role}-0 rank {number}" for role in ("prefill", "decode") for number in range(2)}
    others = {"router", "prefill-0 leader", "decode-0 leader"}
    assert others | ranks <= actors.keys()
    assert not {title for title in actors if "Actor" in title}
    own = psutil.Process(cluster.pid).nice()
    assert {actors[name].nice() for name in others} == {own}
    assert {actors[name].nice() for name in ranks} == {max(own, RANK_NICENESS)}, "router and leaders come first"
    (parent,) = {actors[name].ppid() for name in others | ranks}
    assert fork_server.__name__ in psutil.Process(parent).cmdline(), "they are forked"


def test_what_processes_of_ray_log_comes_as_it_is(terminal: tuple[Foreground, Cluster]) -> None:
    """They write where the command does: no process of Ray forwards it."""
    up, cluster = terminal
    for process in ("router", "prefill-0", "decode-0"):
        assert re.search(rf"^\S+ \S+ {process} INFO ", up.output, re.MULTILINE), up.output
    commands = [" ".join(each.cmdline()) for each in psutil.Process(cluster.pid).children(recursive=True)]
    assert not [each for each in commands if "log_monitor" in each]


@pytest.mark.parametrize("command", [["down"], ["status"], ["generate", "--prompt", "hello"], ["chat"]])
def test_commands_without_a_cluster_say_so(ringserve: Ringserve, command: list[str]) -> None:
    assert "no cluster named 'nobody' runs here" in refused(ringserve.run, *command, "--name", "nobody")


def test_a_gateway_that_cannot_be_reached_is_named(ringserve: Ringserve) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        assert f"the gateway at {target} cannot be reached" in refused(ringserve.run, "status", "--target", target)


def test_ctrl_c_ends_a_cluster_in_the_foreground_whole_and_in_order(
    ringserve: Ringserve, terminal: tuple[Foreground, Cluster]
) -> None:
    """The last test of the shared cluster, which it ends."""
    up, cluster = terminal
    inference = Inference(cluster.gateway)
    with inference.running(ids(random_tokens(30), max_tokens=4000)) as call:
        assert up.interrupt() == 0, up.output
        with pytest.raises(grpc.RpcError, match="the gateway is stopping"):
            list(call)
    inference.channel.close()
    up.check_nothing_is_left()
    assert "no cluster named 'shared'" in refused(ringserve.run, "status", "--name", cluster.name)


@pytest.mark.parametrize("stage", ["starting Ray", "starting 2 rings"])
def test_ctrl_c_ends_a_cluster_that_is_still_starting(
    ringserve: Ringserve, model_path: Path, tmp_path: Path, stage: str
) -> None:
    with started(ringserve, tmp_path, "up", *small(model_path)) as up:
        wait_until(lambda: stage in up.output, "it has come so far", START_SECONDS)
        assert up.interrupt() == 0, up.output
        up.check_nothing_is_left()
