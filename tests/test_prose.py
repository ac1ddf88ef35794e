"""Rules for the texts of the repository: words of the glossary, openings of docstrings, lengths of lines, citations."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_repository import ROOT, sources

# Each pattern is a word that the glossary replaces; the value is the glossary's own word.
INSTEAD = {
    r"groups?": "ring",
    r"doors?": "endpoint or server",
    r"step borders?": "step boundary",
    r"books?|bookkeeping": "registry",
    r"(?:give|gives|gave|given|giving) way|paus(?:e|es|ed|ing)": "preempt",
    r"kept": "retained or cached",
    r"(?:let|lets|letting) go": "release or free",
    r"stretch(?:es)?": "span of tokens or run of slots",
    r"meetings?": "rendezvous",
    r"bells?": "event or wakeup",
    r"journeys?": "gather, broadcast or all-to-all",
    r"twins?": "replica",
}
# Terms of Kubernetes, Ray, Prometheus, asyncio and pytest-xdist that contain such a word.
TERMS = re.compile(
    r"(?:worker|placement|process|parallel|task|exception|rule|xdist)[ -]groups?"
    r"|groups? of rules|garbage collection pauses?",
    re.IGNORECASE,
)
# Layers where a group is torch's: processes of tensor parallelism, query heads of one KV head.
GROUPS_OF_TORCH = re.compile(r"(?:tests/)?(?:cp_core|workers)/")
WORDS = re.compile(r"(?<![\w.`/'\"{=-])(?:" + "|".join(INSTEAD) + r")(?![\w`/={-])", re.IGNORECASE)
ANYWHERE = re.compile(r"\b(?:" + "|".join(INSTEAD) + r")\b", re.IGNORECASE)
CODE = re.compile(r"``?[^`]*``?")
OPENINGS = re.compile(
    r"(?:What|Whether|Of|Where|Who|Which|As|When|How|Whoever|Nobody|One that|That|From)\b(?!-)",
)
MAX_COLUMNS = 120
PACKAGES = ("services", "orchestration", "workers", "cp_core")
COMMENT = re.compile(r"(?:^|\s)(?:#|//)\s?(.*)$")
TEXTS = (".md", ".proto", ".yaml", ".tpl", ".toml", ".sh", "NOTES.txt", "Makefile", "Dockerfile")
FOLDERS = "bench|cp_core|docs|examples|helm|orchestration|proto|services|tests|workers"
CITED = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*[\w/]")


@cache
def docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    """Return line and text of each docstring of a Python file, those of constants and fields included."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
    constants = [node.value for node in nodes if isinstance(node.value, ast.Constant)]
    return tuple((node.lineno, inspect.cleandoc(node.value)) for node in constants if isinstance(node.value, str))


def messages(path: Path) -> list[tuple[int, str]]:
    """Return line and text of errors, logs and help texts: the packages' other string constants with a space."""
    nodes = list(ast.walk(ast.parse(path.read_text()))) if path.relative_to(ROOT).parts[0] in PACKAGES else []
    documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documents]
    return [
        (node.lineno, node.value) for node in constants if isinstance(node.value, str) and " " in node.value.strip()
    ]


@cache
def prose(path: Path) -> tuple[tuple[int, str], ...]:
    """Return line number and text of everything in a file that is written for readers, without code in backticks."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        lines = [(at + i, line) for at, doc in docstrings(path) for i, line in enumerate(doc.splitlines())]
        found = [*comments, *lines, *messages(path)]
    elif path.suffix == ".md":
        bare = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
        found = list(enumerate(bare.splitlines(), 1))
    else:
        numbered = enumerate(text.splitlines(), 1)
        found = [(number, match[1]) for number, line in numbered if (match := COMMENT.search(line))]
    return tuple((number, TERMS.sub("", CODE.sub("", line))) for number, line in found)


def repository_texts() -> Iterator[Path]:
    yield from (path for path in sources(".py", *TEXTS) if path.name != Path(__file__).name)


def replaced_words(path: Path) -> Iterator[str]:
    """Yield each place of a text with a word that the glossary replaces."""
    name = str(path.relative_to(ROOT))
    # Most files have no such word, and to find the prose in a file takes a while.
    for number, line in prose(path) if ANYWHERE.search(path.read_text()) else ():
        for found in WORDS.finditer(line):
            if not (GROUPS_OF_TORCH.match(name) and "group" in found[0].lower()):
                (instead,) = (value for word, value in INSTEAD.items() if re.fullmatch(word, found[0], re.IGNORECASE))
                yield f"{name}:{number}: {found[0]}; say {instead}"


def test_no_text_uses_a_word_that_the_glossary_replaces() -> None:
    assert [place for path in repository_texts() for place in replaced_words(path)] == []


@pytest.mark.parametrize("word", ["a group", "two doors", "KV that is kept", "gave way"])
def test_a_replaced_word_is_found(word: str) -> None:
    assert WORDS.search(f"Here is {word}, in a sentence.")


@pytest.mark.parametrize("term", ["`kept_fraction`", "worker group", "rule groups", "asyncio.TaskGroup"])
def test_terms_of_others_and_code_are_no_replaced_words(term: str) -> None:
    assert not WORDS.search(TERMS.sub("", CODE.sub("", f"The {term} stands here.")))


def test_no_docstring_opens_with_a_relative_clause() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text.splitlines()[0]}"
        for path in sources(".py")
        for number, text in docstrings(path)
        if OPENINGS.match(text)
    ]
    assert found == []


def test_no_line_of_prose_is_too_long() -> None:
    """Tables and links cannot be wrapped, code is formatted by its own tool."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)}"
        for path in sources(*TEXTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
        and not line.startswith(("|", "["))
        and (path.suffix == ".md" or re.match(r"\s*(?:#|//|\{\{-? ?/\*)", line))
    ]
    assert found == []


def test_decision_records_are_numbered_without_holes() -> None:
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    assert [name[:5] for name in names] == [f"{number:04d}-" for number in range(1, len(names) + 1)]
    titles = [(ROOT / "docs/decisions" / name).read_text().partition(". ")[0] for name in names]
    assert titles == [f"# {name[:4]}" for name in names]


def test_texts_cite_only_decision_records_that_exist() -> None:
    numbers = {path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")}
    cited = {
        (str(path.relative_to(ROOT)), number)
        for path in sources(".py", *TEXTS)
        for number in re.findall(r"(?:decision |decisions/|\[)(0\d{3})\b", path.read_text())
    }
    assert {pair for pair in cited if pair[1] not in numbers} == set()


def test_every_page_is_found_from_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    pages |= {f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md")}
    assert {page for page in pages if f"]({page})" not in index} == set()
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_documents_cite_only_files_and_folders_that_exist() -> None:
    files = {path.name for path in sources(".py")}
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(".md")
        for text in [re.sub(r"https?://\S+", "", path.read_text())]
        for name in [*CITED.findall(text), *re.findall(r"(?<![\w/*.-])\w+\.py\b", text)]
        if not (name in files if "/" not in name else ((ROOT / name).exists() or (path.parent / name).exists()))
    ]
    assert wrong == []
