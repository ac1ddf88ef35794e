"""Lint and the tests of what changed, in under a minute: `make quick`.

What changed is what differs from the commit at which this branch left the main branch, and files that git does not
know yet. A source file's tests are those of the same name in the mirrored folder (`workers/kv/pulls.py`:
`tests/workers/kv/test_pulls.py`); if there are none, those in that folder which import it. Tests that start a cluster
run only if they are named. `make quick TESTS=tests/workers/kv` tests one folder instead.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# Few tests start faster in one process.
SMALL = 3


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def list_changes() -> list[str]:
    """Return changed and new files that exist, as paths from the root."""
    bases = (git("merge-base", "HEAD", main) for main in ("origin/main", "main"))
    base = next((found[0] for found in bases if found), "HEAD")
    changed = git("diff", "--name-only", "--diff-filter=d", base)
    return sorted({*changed, *git("ls-files", "--others", "--exclude-standard")})


def find_tests(changed: list[str]) -> list[str]:
    """Return the test files of changed files."""
    found = set[str]()
    for name in changed:
        path = Path(name)
        if path.suffix == ".md":
            found.add("tests/test_prose.py")
        if path.suffix != ".py" or "e2e" in path.parts:
            continue
        if path.name.startswith("test_"):
            found.add(name)
            continue
        # The client lies in proto/ringserve, and its tests in tests/proto.
        mirrored = Path("tests", *(part for part in path.with_suffix("").parts if part not in ("tests", "ringserve")))
        same_name = mirrored.with_name(f"test_{mirrored.name}.py")
        if (ROOT / same_name).exists():
            found.add(str(same_name))
        else:
            module = f"{path.parent.name}.{path.stem}"
            tests = (ROOT / mirrored).parent.glob("test_*.py")
            found |= {str(test.relative_to(ROOT)) for test in tests if module in test.read_text()}
    return sorted(found)


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def main(named: list[str]) -> int:
    changed = list_changes()
    sources = [name for name in changed if name.endswith(".py")]
    checks = [("ruff", "check", "--quiet", "."), ("ruff", "format", "--check", "--quiet", "."), ("mypy",)]
    if sources:
        checks.append(("lint-imports", "--no-logo"))
    tests = named or find_tests(changed)
    with ThreadPoolExecutor(1) as pool:
        # mypy has a cache: beside the tests it is not seen.
        linting = [pool.submit(run, *check) for check in checks]
        tested = 0
        if tests:
            print("tests of", *tests if len(tests) < 10 else (f"{len(tests)} files",))
            workers = [] if len(tests) < SMALL and not named else ["-n", "2"]
            tested = subprocess.run([str(BIN / "pytest"), "-q", *workers, *tests], cwd=ROOT, check=False).returncode
        else:
            print(f"no tests belong to the {len(changed)} changed files: name some, make quick TESTS=tests/...")
        failed = [output for status, output in (check.result() for check in linting) if status]
    print(*failed, "lint failed" if failed else "lint passed", sep="\n")
    return 1 if failed or tested else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
