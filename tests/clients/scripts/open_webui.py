"""Open WebUI: its server asks the service for its users, who speak to its own API."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from checks import MODEL, QUESTION, URL, expect, run

START_SECONDS = 120.0
with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = free.getsockname()[1]
BASE = f"http://127.0.0.1:{PORT}"
asked = [{"role": "user", "content": QUESTION}]


def post(path: str, body: dict[str, Any], token: str = "") -> bytes:
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def complete(messages: list[dict[str, Any]], *, stream: bool = False) -> bytes:
    return post(
        "/api/chat/completions", {"model": MODEL, "messages": messages, "stream": stream, "temperature": 0}, token
    )


def message() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(complete(asked))["choices"][0]["message"]
    return found


def chat() -> None:
    expect("Paris" in message()["content"])


def stream() -> None:
    lines = [line.removeprefix(b"data: ") for line in complete(asked, stream=True).splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk.get("choices"))
    expect("Paris" in text, text)


def second_turn() -> None:
    expect(json.loads(complete([*asked, message(), {"role": "user", "content": "And of Italy?"}]))["usage"])


with tempfile.TemporaryDirectory(prefix="ringserve-webui-") as data:
    environment = os.environ | {
        "DATA_DIR": data,
        "OFFLINE_MODE": "true",
        "OPENAI_API_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "false",
        "RAG_EMBEDDING_MODEL": "",
    }
    program = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    server = subprocess.Popen(program, env=environment, cwd=data, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{BASE}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                expect(time.monotonic() < deadline and server.poll() is None, "the server did not start")
                time.sleep(0.5)  # another program's server: nothing tells when it listens
        account = {"name": "a", "email": "a@example.com", "password": "a-Password-1"}
        token = json.loads(post("/api/v1/auths/signup", account))["token"]
        run(chat=chat, stream=stream, second_turn=second_turn)
    finally:
        server.terminate()
        server.wait(30)
