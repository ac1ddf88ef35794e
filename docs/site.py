"""Hook of mkdocs.yml: gives every page of the repository its own path in the site, so that links work in both."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "examples/**/README.md", "helm/*.md", "proto/*.md")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs/` by all pages and the files that they link to, sources among them."""
    for file in [*files.documentation_pages(), *files.media_files()]:
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            files.remove(file)
    pages = {page for pattern in PAGES for page in ROOT.glob(pattern) if "node_modules" not in page.parts}
    linked = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())}
    for path in sorted(pages | {path for path in linked if path.is_file()}):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files
