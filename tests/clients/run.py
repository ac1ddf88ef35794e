"""`make clients`: other people's clients against a real cluster of the real model, each in an environment of its own.

A client's script in `scripts/` takes the address from RINGSERVE_URL and prints a JSON object a check. The results
become the table of docs/clients.md. Environments lie in `.clients/` and are made once; npm and PyPI are asked for them.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringserve.workers.model.builtin import resolve_model_path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PAGE = ROOT / "docs" / "clients.md"
MODEL = "smollm2"
CHECKS = ("chat", "stream", "second turn", "tools", "structured", "long prompt", "pause")
"""Ordinary uses of a client. "second turn" sends the client's own message object, "pause" waits 20 s between turns."""
CLIENT_SECONDS = 300.0
START_SECONDS = 240.0
INSTALL_SECONDS = 900.0
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
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
    """Client by the packages that install it: of PyPI, or of npm where its script is for Node."""

    name: str
    script: str
    packages: tuple[str, ...]


CLIENTS = (
    Client(name="openai-python", script="openai_python.py", packages=("openai",)),
    Client(name="anthropic-python", script="anthropic_python.py", packages=("anthropic",)),
    Client(name="LiteLLM", script="litellm_client.py", packages=("litellm",)),
    Client(name="pydantic-ai", script="pydantic_ai_client.py", packages=("pydantic-ai-slim[openai]",)),
    Client(name="LangChain", script="langchain_client.py", packages=("langchain-openai",)),
    Client(name="LlamaIndex", script="llama_index_client.py", packages=("llama-index-llms-openai-like",)),
    Client(name="instructor", script="instructor_client.py", packages=("instructor",)),
    Client(name="llm", script="llm_client.py", packages=("llm",)),
    Client(name="openai-node", script="openai_node.mjs", packages=("openai", "zod")),
    Client(name="Vercel AI SDK", script="vercel_ai.mjs", packages=("ai", "@ai-sdk/openai-compatible", "zod")),
)


def prepare(client: Client, home: Path) -> tuple[list[str], str]:
    """Make a client's environment unless it is there -> the command of its script, and the installed version."""
    folder = home / client.script.partition(".")[0]
    if client.script.endswith(".mjs"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPTS / client.script, folder)
        if not (folder / "node_modules").is_dir():
            run = ["npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages]
            subprocess.run(run, cwd=folder, check=True, timeout=INSTALL_SECONDS)
        found = json.loads((folder / "node_modules" / client.packages[0] / "package.json").read_text())
        return ["node", str(folder / client.script)], str(found["version"])
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *client.packages]
        subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
        (folder / "ready").touch()
    name = client.packages[0].partition("[")[0]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    version = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return [str(python), str(SCRIPTS / client.script)], version


@contextmanager
def served() -> Iterator[str]:
    """Serve the real model, with a chat template that takes tools -> the address of HTTP."""
    ringserve = str(Path(sys.executable).with_name("ringserve"))
    subprocess.run([ringserve, "import", "builtin:smollm2"], check=True, timeout=INSTALL_SECONDS)
    name = f"clients-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="ringserve-clients-") as folder:
        model = Path(folder)
        for file in resolve_model_path("builtin:smollm2").iterdir():
            (model / file.name).symlink_to(file)
        settings = json.loads((model / "tokenizer_config.json").read_text())
        for file_name in ("tokenizer_config.json", "chat_template.jinja"):
            (model / file_name).unlink(missing_ok=True)
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
        command = [ringserve, "serve", str(model), "--served-model-name", MODEL, "--name", name, "--detach", "--json"]
        command += ["--port", "0", "--set", "gateway.listen=127.0.0.1:0"]
        started = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=START_SECONDS)
        try:
            yield f"http://{json.loads(started.stdout)['http']}"
        finally:
            subprocess.run([ringserve, "down", "--name", name], check=True, timeout=START_SECONDS)


def ask(command: list[str], url: str) -> dict[str, str]:
    """Run a client's script -> what became of each check: "yes", "-" (the client has no such use), or the fault."""
    environment = os.environ | {"RINGSERVE_URL": url, "RINGSERVE_MODEL": MODEL}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {check: f"no end within {CLIENT_SECONDS:g} s" for check in CHECKS}
    told = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"'))
    results = {each["check"]: each["result"] for each in told}
    if done.returncode and len(results) < len(CHECKS):
        print(done.stderr[-2000:], file=sys.stderr)
    return {check: results.get(check, "-" if done.returncode == 0 else "the script ended") for check in CHECKS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of clients, with commas")
    options = parser.parse_args()
    chosen = [each for each in CLIENTS if not options.only or each.name in options.only.split(",")]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    told, _, after = rest.partition(END)
    rows, faults = {line.split("|")[1].strip(): line for line in told.splitlines()[3:]}, 0
    commands = [(client, *prepare(client, ROOT / ".clients")) for client in chosen]
    with served() as url:
        for client, command, version in commands:
            results = ask(command, url)
            print(client.name, version, json.dumps(results), flush=True)
            faults += sum(result not in ("yes", "-") for result in results.values())
            shown = [result if result in ("yes", "-") else "**no**" for result in results.values()]
            rows[client.name] = f"| {client.name} | {version} | {' | '.join(shown)} |"
    head = ["| client | version | " + " | ".join(CHECKS) + " |", "|---" * (len(CHECKS) + 2) + "|"]
    PAGE.write_text("\n".join([before + BEGIN, *head, *rows.values(), END]) + after)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
