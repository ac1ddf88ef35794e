"""Rules for the texts of the repository: line lengths, links, citations."""

import re

from tests.test_repository import ROOT, sources

MAX_COLUMNS = 120
TEXTS = (".md", ".proto", ".yaml", ".tpl", ".toml", ".sh", "NOTES.txt", "Makefile", "Dockerfile")
FOLDERS = "bench|cp_core|docs|examples|helm|orchestration|proto|services|tests|workers"
CITED = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*[\w/]")


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
