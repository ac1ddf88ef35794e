"""Documents that promise, and what tries each of their sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.bad_days import SCENARIOS
from bench.chaos.promises import ROOT, judge, read_promises, read_sentences
from ringserve.cp_core.errors import ConfigError

DOCUMENTS = ("securing.md", "limits.md")


def test_every_sentence_is_tried_by_what_exists_or_says_why_not() -> None:
    promises = read_promises(ROOT / "docs", ROOT / "tests")
    assert {promise.document for promise in promises} == set(DOCUMENTS)
    assert {each for promise in promises for each in promise.scenarios} <= set(SCENARIOS)
    for promise in promises:
        assert bool(promise.why_not) != bool(promise.tests or promise.scenarios), promise


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_sentence_that_nothing_tries_is_named(document: str, tmp_path: Path) -> None:
    for each in DOCUMENTS:
        (tmp_path / each).write_text((ROOT / "docs" / each).read_text())
    with (tmp_path / document).open("a") as file:
        file.write("\nEvery answer comes within a second.\n")
    with pytest.raises(ConfigError, match=rf"docs/{document}: nothing .* tries 'Every answer comes within a second.'"):
        read_promises(tmp_path, ROOT / "tests")


def test_a_sentence_that_left_the_document_and_a_test_that_is_gone_are_named(tmp_path: Path) -> None:
    for each in DOCUMENTS:
        (tmp_path / each).write_text((ROOT / "docs" / each).read_text())
    (tmp_path / "tests").mkdir()
    with pytest.raises(ConfigError, match="there is no test "):
        read_promises(ROOT / "docs", tmp_path / "tests")
    (tmp_path / "limits.md").write_text("")
    with pytest.raises(ConfigError, match=r"docs/limits.md: no sentence starts with 'Models: the families'"):
        read_promises(tmp_path, ROOT / "tests")


@pytest.mark.parametrize(
    ("outcomes", "judged"),
    [
        ({"a.py::test_b[1]": True, "a.py::test_b[2]": True, "a.py::test_bc": False}, "held"),
        ({"a.py::test_b[1]": True, "a.py::test_b[2]": False}, "BROKEN"),
        ({"a.py::test_bc": True}, "not run"),
    ],
)
def test_a_promise_holds_if_its_tests_ran_and_passed(outcomes: dict[str, bool], judged: str) -> None:
    assert judge(["a.py::test_b"], outcomes) == judged
    assert judge(["a.py"], outcomes) == ("BROKEN" if False in outcomes.values() else "held")
    assert judge(["a.py::test_b", "c.py"], outcomes | {"c.py::test_d": True}) == judged


def test_sentences_are_whole_and_have_neither_links_nor_code() -> None:
    text = "# Title\n\n- One is\n  long ([page](#t)). `Two` e.g. this.\n- One: a; b.\n\n```yaml\nkey: 1.\n```\nFour.\n"
    assert read_sentences(text) == ["One is long (page).", "`Two` e.g. this.", "One: a; b.", "Four."]
