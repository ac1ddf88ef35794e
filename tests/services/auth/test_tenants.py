"""File of tokens: its tenants, their expiry, and the errors for a wrong file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from ringserve.cp_core.errors import CapacityExceeded, ConfigError, Forbidden, InvalidRequest, Unauthenticated
from ringserve.services.auth.authenticator import Authenticator, TenantLimits, TokenFile
from ringserve.services.auth.tenants import ANYBODY, Tenant, hash_token, new_token
from ringserve.services.config import config_from

NOW = 1_800_000_000.0  # in January 2027


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def written(path: Path, *tenants: object) -> Path:
    file = path / "tokens.yaml"
    file.write_text(yaml.safe_dump({"tenants": list(tenants)}))
    return file


def entry(name: str, *tokens: str, **more: object) -> dict[str, object]:
    return {"name": name, "tokens": [{"sha256": hash_token(token)} for token in tokens], **more}


def test_a_token_names_its_tenant(tmp_path: Path) -> None:
    limits = {"max_concurrent_turns": 3, "max_turns_per_minute": 5, "operator": True}
    tokens = TokenFile(written(tmp_path, entry("acme", "a1", "a2", **limits), entry("beta", "b")), Clock())
    acme = Tenant(name="acme", max_concurrent_turns=3, max_turns_per_minute=5, is_operator=True)
    assert tokens.find_tenant("Bearer a1") == tokens.find_tenant("bearer a2") == acme
    assert tokens.find_tenant("Bearer b") == Tenant(name="beta")
    assert Tenant(name="beta").max_priority == 0 < ANYBODY.max_priority, "to overtake other tenants is granted"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "none given"),
        ("", "none given"),
        ("a", "only 'Bearer TOKEN'"),
        ("Basic YTph", "only 'Bearer TOKEN'"),
        ("Bearer ", "not known"),
        ("Bearer secret-b", "not known"),
        ("Bearer secret-a x", "not known"),
        ("Bearer \udcff", "not known"),
    ],
)
def test_what_is_no_known_token_is_refused_and_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: str | None, said: str
) -> None:
    tokens = TokenFile(written(tmp_path, entry("acme", "secret-a")), Clock())
    with caplog.at_level(logging.DEBUG), pytest.raises(Unauthenticated) as caught:
        tokens.find_tenant(sent)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("expires", ["2027-01-15T08:00:00Z", "2027-01-15 08:00:00", "2027-01-15T10:00:00+02:00"])
def test_a_token_holds_until_it_expires(tmp_path: Path, expires: str) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f"tenants: [{{name: a, tokens: [{{sha256: {hash_token('t')}, expires: {expires}}}]}}]")
    clock = Clock(NOW - 1)
    tokens = TokenFile(file, clock)
    assert tokens.find_tenant("Bearer t").name == "a"
    clock.now = NOW
    with pytest.raises(Unauthenticated, match="the token has expired"):
        tokens.find_tenant("Bearer t")


def test_a_changed_file_counts_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    tokens = TokenFile(written(tmp_path, entry("acme", "old")), clock)
    written(tmp_path, entry("acme", "newer"))
    clock.now += 1.5
    assert tokens.find_tenant("Bearer newer").name == "acme"
    with pytest.raises(Unauthenticated):
        tokens.find_tenant("Bearer old")


def test_a_file_that_becomes_wrong_changes_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tokens = TokenFile(written(tmp_path, entry("acme", "a")), clock)
    written(tmp_path, {"name": "acme", "passwords": []})
    clock.now += 1.5
    assert tokens.find_tenant("Bearer a").name == "acme"
    assert "keeping the old tokens: auth.tokens: tenants[0].passwords: no such key" in caplog.text
    (tmp_path / "tokens.yaml").unlink()
    clock.now += 1.5
    assert tokens.find_tenant("Bearer a").name == "acme"


SAME = {"sha256": hash_token("t")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "must hold 'tenants:'"),
        ("{tenants: {}}", "must hold 'tenants:'"),
        ("{tenants: [], more: 1}", "must hold 'tenants:'"),
        ("{tenants: [", "is not valid YAML"),
        ("{tenants: [7]}", "tenants[0]: must hold name"),
        ("{tenants: [{tokens: []}]}", "tenants[0].name"),
        ("{tenants: [{name: A/b, tokens: []}]}", "tenants[0].name"),
        ("{tenants: [{name: a}]}", "tenants[0].tokens: must be a list"),
        ("{tenants: [{name: a, tokens: [plain]}]}", "tokens[0]: must hold sha256"),
        ("{tenants: [{name: a, tokens: [{sha256: plain}]}]}", "tokens[0].sha256: must be 64 hexadecimal digits"),
        (
            f"{{tenants: [{{name: a, tokens: [{{sha256: {SAME['sha256']}, expires: soon}}]}}]}}",
            "expires: must be a time",
        ),
        (yaml.safe_dump({"tenants": [{"name": "a", "tokens": [SAME, SAME]}]}), "tokens[1].sha256: is given twice"),
        ("{tenants: [{name: a, tokens: []}, {name: a, tokens: []}]}", "tenants[1].name: 'a' is given twice"),
        ("{tenants: [{name: a, tokens: [], max_concurrent_turns: -1}]}", "max_concurrent_turns: -1 is out of range"),
        ("{tenants: [{name: a, tokens: [], max_turns_per_minute: true}]}", "max_turns_per_minute: True"),
        ("{tenants: [{name: a, tokens: [], operator: maybe}]}", "operator: 'maybe' is not allowed"),
    ],
)
def test_a_wrong_file_is_refused_by_the_entry(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TokenFile(file)
    assert said in str(caught.value)
    assert SAME["sha256"] not in str(caught.value)
    assert "plain" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth.tokens: .*none.yaml cannot be read"):
        TokenFile(tmp_path / "none.yaml")


def test_new_tokens_differ_and_fit_a_header() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.isascii() and token.isprintable() and " " not in token for token in tokens)


def test_without_tokens_everybody_is_one_tenant_who_may_ask_anything() -> None:
    authenticator = Authenticator()
    for sent in (None, "Bearer whatever", "nonsense"):
        assert authenticator.find_tenant(sent) is ANYBODY
    authenticator.check_operator(ANYBODY)
    with pytest.raises(Forbidden, match="tenant 'acme' is no operator"):
        authenticator.check_operator(Tenant(name="acme"))


def test_a_tenant_runs_no_more_turns_at_a_time_than_it_may() -> None:
    limits, acme = TenantLimits(), Tenant(name="acme", max_concurrent_turns=2)
    with limits.turns(acme), limits.turns(acme):
        with (
            pytest.raises(CapacityExceeded, match="'acme' runs 2 turns, asks for 1 and"),
            limits.turns(acme),
        ):
            raise AssertionError("one too many")
        with limits.turns(Tenant(name="beta", max_concurrent_turns=1)):
            pass
    with limits.turns(acme):
        pass


def test_a_turn_that_fails_is_no_longer_counted() -> None:
    limits, acme = TenantLimits(), Tenant(name="acme", max_concurrent_turns=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), limits.turns(acme):
            raise ZeroDivisionError


def test_turns_a_minute_come_back_evenly_and_the_refusal_says_when() -> None:
    clock = Clock(0.0)
    limits, acme = TenantLimits(clock), Tenant(name="acme", max_turns_per_minute=30)
    for _ in range(30):
        with limits.turns(acme):
            pass
    with pytest.raises(CapacityExceeded, match="30 turns a minute") as caught, limits.turns(acme):
        raise AssertionError("one too many")
    assert caught.value.retry_after_seconds == pytest.approx(2.0)
    clock.now += 2.0
    with limits.turns(acme):
        pass
    with pytest.raises(CapacityExceeded), limits.turns(acme):
        raise AssertionError("one too many")
    clock.now += 3600
    for _ in range(30):
        with limits.turns(acme):
            pass
    with pytest.raises(CapacityExceeded), limits.turns(acme):
        raise AssertionError("what was not used is not saved up")


def test_answers_to_one_prompt_count_each_and_what_can_never_be_is_no_matter_of_waiting() -> None:
    limits, acme = TenantLimits(Clock(0.0)), Tenant(name="acme", max_concurrent_turns=3, max_turns_per_minute=5)
    with limits.turns(acme, 3), pytest.raises(CapacityExceeded), limits.turns(acme, 1):
        raise AssertionError("one too many")
    with pytest.raises(CapacityExceeded, match="5 turns a minute") as caught, limits.turns(acme, 3):
        raise AssertionError("one too many")
    assert caught.value.retry_after_seconds == pytest.approx(12.0)
    with pytest.raises(InvalidRequest, match="n: 4 answers are too many, tenant 'acme' may have 3 at a time"):
        limits.turns(acme, 4).__enter__()
    with pytest.raises(InvalidRequest, match="may have 5 a minute"):
        limits.turns(Tenant(name="beta", max_turns_per_minute=5), 6).__enter__()


def test_tenants_that_share_prompts_are_named_once_each() -> None:
    assert config_from({}).router.communities == ()
    together = {"router": {"share_prompts": "acme,beta  gamma,delta,eve"}}
    assert config_from(together).router.communities == (("acme", "beta"), ("gamma", "delta", "eve"))
    for value, said in (
        ("acme,Be", "router.share_prompts: 'Be' is no tenant's name; give each name once, e.g. acme,beta"),
        ("acme,", "router.share_prompts: '' is no tenant's name"),
        ("acme,beta acme,eve", "router.share_prompts: 'acme' is named twice; give each name once"),
    ):
        with pytest.raises(ConfigError, match=said):
            config_from({"router": {"share_prompts": value}})
