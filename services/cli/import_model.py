"""`ringserve import`: make a Hugging Face directory of a GGUF file, or fetch the built-in one with trained weights.

`ringserve up` and `ringserve demo` call `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ringserve.cp_core.errors import ConfigError
from ringserve.services.cli.command import argument, command, one_of
from ringserve.workers.model.builtin import PREFIX, SMOLLM2, resolve_model_path
from ringserve.workers.model.info import ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    source: str = argument("GGUF file of a Llama, Qwen2 or Qwen3, or builtin:smollm2", "MODEL")
    directory: Path | None = argument("new directory for a GGUF file's model", "DIR", None)
    dtype: str = one_of(
        "type of the weights on disk; float32 is exact, the others round, and take half the space",
        sorted(ELEMENT_BYTES),
        "float32",
    )


@command("ringserve import Llama-3.2-1B-Instruct-Q8_0.gguf llama-1b", "ringserve import builtin:smollm2")
def import_(options: ImportOptions) -> int:
    console = Console(stderr=True)
    if options.source.startswith(PREFIX):
        if options.directory is not None:
            raise ConfigError(f"DIR: {options.source} lies in the cache; give DIR with a GGUF file only")
        prepare(options.source, console)
        print(resolve_model_path(options.source))
        return 0
    if options.directory is None:
        raise ConfigError("DIR: a GGUF file needs a directory for its model")
    from ringserve.services.offline.importing.convert import convert  # here: gguf takes a fifth of a second to import

    with _reporting(console) as progress:
        convert(Path(options.source), options.directory, progress, options.dtype)
    print(options.directory)
    return 0


def prepare(model: str, console: Console) -> None:
    """Fetch builtin:smollm2 if `model` names it and the cache does not hold it. Raises ModelRefused."""
    if model != PREFIX + SMOLLM2:
        return
    from ringserve.services.offline.importing.fetch import prepare_smollm2  # here: see above

    with _reporting(console) as progress:
        prepare_smollm2(progress)


@contextmanager
def _reporting(console: Console) -> Iterator[Callable[[str, float | None], None]]:
    """Yield a report of progress: a bar on a terminal, else a line for each piece of work."""
    said = ""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def report(work: str, part: float | None) -> None:
            nonlocal said
            if not console.is_terminal and work != said:
                console.print(work)
            said = work
            bar.update(task, description=work, total=None if part is None else 1.0, completed=part or 0.0, visible=True)

        yield report
