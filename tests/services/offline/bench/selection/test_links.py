"""Commands that give links their rate, and their failures in one sentence."""

from __future__ import annotations

import pytest

from cp_core.errors import ConfigError, Unavailable
from services.offline.bench.selection.links import (
    LEAST_BURST_BYTES,
    LEAST_QUEUE_BYTES,
    LinkRate,
    address_commands,
    address_of,
    bridge_commands,
    cable_commands,
    isolation,
    parse_rate,
    run_all,
    shape_commands,
)


@pytest.mark.parametrize(("text", "bits"), [("500kbit", 5e5), ("50mbit", 5e7), ("1gbit", 1e9), ("2.5gbit", 2.5e9)])
def test_a_rate_is_read_and_shown_as_tc_writes_it(text: str, bits: float) -> None:
    assert parse_rate(text) == LinkRate(bits)
    assert str(parse_rate(text)) == text
    assert parse_rate(text).bytes_per_second == bits / 8


@pytest.mark.parametrize("text", ["", "50", "0mbit", "-1mbit", "1Gbit", "fast", "1 gbit"])
def test_a_bad_rate_is_refused_with_allowed_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--rates: {text!r} is no rate; allowed are those like 500kbit, 50mbit"):
        parse_rate(text)


def shaper_of(rate: str) -> dict[str, str]:
    """Return the parameters of tbf by name."""
    ((*command, kind, rate_key, rate_text, burst_key, burst, queue_key, queue),) = shape_commands(parse_rate(rate))
    assert command == ["tc", "qdisc", "replace", "dev", "eth0", "root"]
    assert kind == "tbf"
    return {rate_key: rate_text, burst_key: burst, queue_key: queue}


def test_egress_of_a_rank_is_shaped_with_a_burst_of_half_a_millisecond() -> None:
    assert shaper_of("1gbit") == {"rate": "1000000000bit", "burst": "62500", "limit": "125000000"}


def test_slow_links_let_two_frames_pass_and_never_drop() -> None:
    assert shaper_of("1mbit") == {
        "rate": "1000000bit",
        "burst": str(LEAST_BURST_BYTES),
        "limit": str(LEAST_QUEUE_BYTES),
    }


def test_each_ring_has_its_bridge_and_each_rank_its_cable_and_address() -> None:
    assert bridge_commands(4)[0] == ("ip", "link", "add", "name", "ring-4", "type", "bridge")
    add, plug = cable_commands(4, 321)
    assert add[-2:] == ("netns", "321")
    assert add[4] == plug[3] == "port-321"
    assert plug[4:] == ("master", "ring-4", "up")
    assert address_of(4, 0) == "10.77.4.1"
    assert ("ip", "address", "add", "10.77.4.3/24", "dev", "eth0") in address_commands(4, 2)


def test_a_failed_command_is_reported_with_its_output() -> None:
    with pytest.raises(Unavailable, match="`cat /no-such-file` failed: cat: /no-such-file: No such file"):
        run_all([("true",), ("cat", "/no-such-file"), ("never-run",)])


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match="no-such-program is not installed"):
        run_all([("no-such-program",)])


def test_a_missing_program_is_reported_before_any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "services.offline.bench.selection.links.shutil.which", lambda name: None if name == "tc" else name
    )
    with pytest.raises(Unavailable, match="tc is not installed; on Debian it is in iproute2"):
        isolation()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that all programs are installed."""
    monkeypatch.setattr("services.offline.bench.selection.links.shutil.which", lambda name: name)


@pytest.mark.usefixtures("installed")
def test_without_namespaces_the_error_names_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(commands: object) -> None:
        raise Unavailable("`unshare` failed: Operation not permitted")

    monkeypatch.setattr("services.offline.bench.selection.links.run_all", refuse)
    with pytest.raises(Unavailable, match=r"lets only root make network namespaces .* not permitted.*as root"):
        isolation()


@pytest.mark.usefixtures("installed")
def test_root_needs_no_user_namespace_and_others_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_with_a_user_namespace(commands: list[tuple[str, ...]]) -> None:
        if "--user" not in commands[0]:
            raise Unavailable("Operation not permitted")

    monkeypatch.setattr("services.offline.bench.selection.links.run_all", lambda commands: None)
    assert isolation() == ("unshare", "--net", "--")
    monkeypatch.setattr("services.offline.bench.selection.links.run_all", only_with_a_user_namespace)
    assert isolation() == ("unshare", "--user", "--map-root-user", "--net", "--")
