"""Commands that make networks of namespaces, and their failures in one sentence."""

from __future__ import annotations

import pytest

from bench.namespaces import (
    address_commands,
    address_of,
    bridge_commands,
    cable_commands,
    cut_commands,
    hub_commands,
    isolation,
    run_all,
)
from ringserve.cp_core.errors import Unavailable


def test_each_network_has_its_bridge_and_each_member_its_cable_and_address() -> None:
    assert bridge_commands(4)[0] == ("ip", "link", "add", "name", "ring-4", "type", "bridge")
    add, plug = cable_commands(4, 321)
    assert add[-2:] == ("netns", "321")
    assert add[4] == plug[3] == "port-321"
    assert plug[4:] == ("master", "ring-4", "up")
    assert address_of(4, 0) == "10.77.4.1"
    assert ("ip", "address", "add", "10.77.4.3/24", "dev", "eth0") in address_commands(4, 2)


def test_a_hub_may_be_the_first_member_of_its_network() -> None:
    *_, hardware, join = hub_commands(4)
    assert hardware == ("ip", "link", "set", "ring-4", "address", "02:00:00:00:00:04")
    assert join == ("ip", "address", "add", f"{address_of(4, 0)}/24", "dev", "ring-4")


def test_a_cut_takes_the_port_of_the_cable_down_and_its_end_up_again() -> None:
    add, _ = cable_commands(4, 321)
    assert cut_commands(321, is_cut=True) == [("ip", "link", "set", add[4], "down")]
    assert cut_commands(321, is_cut=False) == [("ip", "link", "set", add[4], "up")]


def test_a_failed_command_is_reported_with_its_output() -> None:
    with pytest.raises(Unavailable, match="`cat /no-such-file` failed: cat: /no-such-file: No such file"):
        run_all([("true",), ("cat", "/no-such-file"), ("never-run",)])


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match="no-such-program is not installed"):
        run_all([("no-such-program",)])


def test_a_missing_program_is_reported_before_any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.namespaces.shutil.which", lambda name: None if name == "tc" else name)
    with pytest.raises(Unavailable, match="tc is not installed; on Debian it is in iproute2"):
        isolation()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that all programs are installed."""
    monkeypatch.setattr("bench.namespaces.shutil.which", lambda name: name)


@pytest.mark.usefixtures("installed")
def test_without_namespaces_the_error_names_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(commands: object) -> None:
        raise Unavailable("`unshare` failed: Operation not permitted")

    monkeypatch.setattr("bench.namespaces.run_all", refuse)
    with pytest.raises(Unavailable, match=r"lets only root make network namespaces .* not permitted.*as root"):
        isolation()


@pytest.mark.usefixtures("installed")
def test_root_needs_no_user_namespace_and_others_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_with_a_user_namespace(commands: list[tuple[str, ...]]) -> None:
        if "--user" not in commands[0]:
            raise Unavailable("Operation not permitted")

    monkeypatch.setattr("bench.namespaces.run_all", lambda commands: None)
    assert isolation() == ("unshare", "--net", "--")
    monkeypatch.setattr("bench.namespaces.run_all", only_with_a_user_namespace)
    assert isolation() == ("unshare", "--user", "--map-root-user", "--net", "--")
