"""`python -m bench promises`: every sentence of docs/securing.md and docs/limits.md, and what tries it.

`promises.yaml` names, for each sentence, the tests or the scenarios of `python -m bench bad-days` that try it, or says
why none does: the sentence states a lack, or it needs what a test cannot have.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import yaml

from bench.options import Subcommands
from ringserve.cp_core.errors import ConfigError

HELP = """Tries what docs/securing.md and docs/limits.md say, sentence by sentence: runs the tests of each sentence, and
shows which held, which did not, and why nothing tries the others."""
EXAMPLE = """example:
  python -m bench promises
  python -m bench promises --list        # runs nothing
  python -m bench bad-days               # the scenarios that some sentences name
"""
ROOT = Path(__file__).parents[2]
PROMISES = Path(__file__).with_suffix(".yaml")
SECONDS = 3600.0
SCENARIO = "bad-days:"

Known = Mapping[str, Mapping[str, str | Sequence[str]]]
"""For each document, by the start of a sentence: what tries it, or why nothing does."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One sentence of a document: what tries it, or why nothing does."""

    document: str
    sentence: str
    tests: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    why_not: str = ""


def read_sentences(text: str) -> list[str]:
    """Return the sentences of Markdown, without headings and blocks of code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=- )", text))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block.removeprefix("- ")) for block in blocks)
    prose = (block for block in plain if block and not block.startswith("#"))
    return [sentence for block in prose for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`*])", block)]


def read_promises(documents: Path, tests: Path) -> list[Promise]:
    """Return the sentences of all documents in order. Raises ConfigError on a sentence or a test that is not known."""
    places = {}
    for path in sorted(tests.rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def test_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name] = f"{path.relative_to(tests.parent)}::test_{name}"
    found = []
    promises: Known = yaml.safe_load(PROMISES.read_text(encoding="utf-8"))
    for document, known in promises.items():
        left = dict(known)
        for sentence in read_sentences((documents / document).read_text(encoding="utf-8")):
            start = next((start for start in left if sentence.startswith(start)), None)
            if start is None:
                raise ConfigError(f"docs/{document}: nothing in {PROMISES} tries {sentence!r}")
            found.append(_promise(document, sentence, left.pop(start), places, tests.parent))
        if left:
            raise ConfigError(
                f"docs/{document}: no sentence starts with {next(iter(left))!r}; remove it from {PROMISES}"
            )
    return found


def _promise(
    document: str, sentence: str, tried: str | Sequence[str], places: Mapping[str, str], root: Path
) -> Promise:
    if isinstance(tried, str):
        return Promise(document=document, sentence=sentence, why_not=tried)
    scenarios = tuple(word.removeprefix(SCENARIO) for word in tried if word.startswith(SCENARIO))
    tests = [places.get(word, word) for word in tried if not word.startswith(SCENARIO)]
    for test in tests:
        if not (root / test.partition("::")[0]).exists():
            raise ConfigError(f"docs/{document}: there is no test {test} for {sentence!r}")
    return Promise(document=document, sentence=sentence, tests=tuple(tests), scenarios=scenarios)


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "promises",
        help="what securing.md and limits.md say, tried sentence by sentence",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="show what tries each sentence, and run nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the tests and print every sentence. Return 1 if a sentence did not hold."""
    promises = read_promises(ROOT / "docs", ROOT / "tests")
    outcomes = None if options.list else _run_tests({test for promise in promises for test in promise.tests})
    broken = False
    for promise in promises:
        held = "not tried" if promise.why_not else "by bad-days" if not promise.tests else "by tests"
        if outcomes is not None and promise.tests:
            held = judge(promise.tests, outcomes)
        broken = broken or held == "BROKEN"
        print(f"{held:12}{promise.document}: {promise.sentence}")
        by = [*promise.tests, *(SCENARIO + each for each in promise.scenarios)]
        print(*(f"{'':14}{each}" for each in by or [f"({promise.why_not})"]), sep="\n")
    tried = [promise for promise in promises if not promise.why_not]
    reasons = Counter(promise.why_not for promise in promises if promise.why_not)
    not_tried = ", ".join(f"{count} {why}" for why, count in reasons.most_common())
    print(f"{len(promises)} sentences, {len(tried)} tried; of the others: {not_tried}", file=sys.stderr)
    return 1 if broken else 0


def judge(tests: Iterable[str], outcomes: Mapping[str, bool]) -> str:
    """Return "held" if cases of each test ran and all passed, "BROKEN" if one failed, and "not run" otherwise.

    Example: for the test `a.py::test_b`, the case `a.py::test_b[1]` counts and `a.py::test_bc` does not.
    """
    ran = [[outcomes[case] for case in outcomes if re.match(rf"{re.escape(test)}(\W|$)", case)] for test in tests]
    if not all(all(each) for each in ran):
        return "BROKEN"
    return "held" if all(ran) else "not run"


def _run_tests(tests: Collection[str]) -> dict[str, bool]:
    """Run tests -> whether each case that ran has passed, by its id. Raises ConfigError if pytest could not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = (sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}")
        ended = subprocess.run([*command, *sorted(tests)], cwd=ROOT, timeout=SECONDS, check=False, stdout=sys.stderr)
        if ended.returncode not in (0, 1):
            raise ConfigError(f"pytest ended with {ended.returncode}")
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        return {f"{case.get('file')}::{case.get('name')}": case not in failed for case in cases}
