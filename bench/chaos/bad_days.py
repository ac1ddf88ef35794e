"""`python -m bench bad-days`: faults of a machine and of its users, each on a cluster of its own.

Every scenario says what was seen, and whether that is what the documents promise.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx2
import psutil

from bench.chaos.cluster import OwnCluster
from bench.options import Subcommands
from ringserve.client import Sampling
from ringserve.client.async_client import AsyncClient
from ringserve.cp_core.errors import ConfigError, RingserveError, Unavailable
from ringserve.services.cluster.state import DIRECTORY_PREFIX, GONE
from ringserve.services.offline.terminal import console, listing, print_table
from ringserve.workers.model.shared import shared_directory

HELP = """Kills a process of Ray itself, fills the disk, feeds the gateway 24 MB, opens 700 silent connections, floods
it as one tenant, reads answers slowly, takes memory from a rank, kills several processes at once, sets the clock, kills
the starter, and starts and stops clusters again and again."""
EXAMPLE = """example:
  python -m bench bad-days
  python -m bench bad-days --only full-disk --only ray-agent
  python -m bench bad-days --only up-and-down --loops 30
"""
SETTINGS = ("gateway.listen=127.0.0.1:0", "gateway.http=127.0.0.1:0", "gateway.metrics=", "prefill.cp=2", "decode.cp=2")
LOOPS = 5
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.1
MAX_GAP_SECONDS = 3.0
"""Longest gap between two events of a stream that the scenario's fault must not disturb."""
DISK_BYTES = 4 << 20
NUM_SILENT = 700
MAX_FILES = 256
SILENT_SECONDS = 40.0
"""Time within which the gateway must close a connection without a request."""
LONG_ANSWER = 400
NUM_FLOOD, FLOOD_TOKENS, FLOOD_SECONDS = 40, 6000, 30.0
MAX_BEFORE = 2
"""How many of the flood's turns may end before another tenant's equal turn: the running one, and one more."""
QUEUE_SECONDS = 300.0
"""Time in which the whole flood is served."""
TOKENS = {"flood": f"rs-{'f' * 43}", "other": f"rs-{'o' * 43}"}
"""Tokens of the flooding tenant and of another one; only this scenario's cluster knows them."""
DOUBLE_KILLS = (
    ("router", "decode-0 rank 0"),
    ("prefill-0 rank 0", "prefill-0 rank 1", "decode-0 rank 0", "decode-0 rank 1"),
    ("router", "decode-0 leader"),
    ("router", "prefill-0 leader", "decode-0 leader"),
    ("gateway", "router"),
)
CLOCK = """import sys, time
_now = time.time
def _set():
    if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc"):
        return _now()
    with open({path!r}) as file:
        return _now() + 86400 * float(file.read() or 0)
time.time = _set
"""
"""Module that moves the time of day of each Python process of a cluster by the days in a file.

gRPC hands its deadlines to a library in C, which reads the clock of the machine. libfaketime 0.9.10 was tried: neither
Python's `sleep` nor Ray's gcs_server works below it.
"""
RANK_BYTES = 24 << 20
"""Memory that a rank may take beyond what it has."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was seen, and whether it is what is promised."""

    held: bool
    seen: str


class BadDay:
    """Cluster of one scenario, and a client of its HTTP."""

    def __init__(self, cluster: OwnCluster, folder: Path, loops: int) -> None:
        self.cluster = cluster
        self.folder = folder
        self.loops = loops
        self.http = httpx2.AsyncClient(timeout=WAIT_SECONDS)

    async def start(self) -> None:
        await self.cluster.start(lambda line: None)
        self.http.base_url = f"http://{self.cluster.http}"

    def pid(self, name: str) -> int:
        """Return the id of the process of a name; 0 if none runs."""
        self.cluster.processes.look()
        return self.cluster.processes.pid_of(name)

    def kill(self, *names: str) -> None:
        """Kill the processes of some names at once. Raises Unavailable, having killed none, if one does not run."""
        pids = [self.pid(name) for name in names]
        if not all(pids):
            raise Unavailable(f"not all of these run: {', '.join(names)}")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    async def ask(self, conversation: str, prompt: str = "Once upon a time", tokens: int = 12) -> httpx2.Response:
        body = {"model": "builtin:tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body | {"conversation_id": conversation})

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[list[float]]:
        """Read streams one after the other while the body runs -> times of their events. Raises why one ended early."""
        times: list[float] = []

        async def read() -> None:
            while True:
                body = {"model": "builtin:tiny", "prompt": "Once", "max_tokens": LONG_ANSWER, "stream": True}
                async with self.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            if "error" in json.loads(line[6:]):
                                raise Unavailable(f"a stream ended: {line}")
                            times.append(time.monotonic())

        reading = asyncio.create_task(read())
        try:
            await until(lambda: len(times) > 10 or reading.done())
            yield times
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def close(self) -> None:
        await self.http.aclose()
        self.cluster.stop()


def longest(times: Sequence[float]) -> float:
    """Return the longest gap between two times, in seconds."""
    return max((after - before for before, after in pairwise(times)), default=0.0)


async def until(is_done: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
    """Wait for a condition that other processes meet; return whether it was met in time."""
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


async def ray_agent(day: BadDay) -> Verdict:
    """Kill an agent of Ray, which ends Ray: the cluster ends too and says why, so that a supervisor starts it again."""
    await day.start()
    agents = [each for each in below(day) if "Agent" in title(each)]
    if not agents:
        raise Unavailable("no agent of Ray runs")
    agents[0].kill()
    has_ended = await until(lambda: day.cluster.has_ended)
    reason = day.cluster.last_line()
    return Verdict(held=has_ended and "has ended" in reason, seen=reason if has_ended else "it goes on without serving")


async def full_disk(day: BadDay) -> Verdict:
    """Fill the disk and kill the router: it is restarted until there is space again, and nothing is forgotten."""
    await day.start()
    (await day.ask("c")).raise_for_status()
    gateway = day.pid("gateway")
    filler = Path(f"/proc/{gateway}/root{day.cluster.state}/filler")
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    refused = await day.ask("d")
    day.kill("router")
    await until(lambda: "the disk of" in day.cluster.text() and "is full" in day.cluster.text())
    waited = time.monotonic()
    await asyncio.sleep(30)  # longer than the restarts that a router has for other failures
    is_there = not day.cluster.has_ended and day.pid("gateway") == gateway
    filler.unlink()
    freed = time.monotonic()
    while (answer := await day.ask("c")).status_code != 200 and time.monotonic() - freed < WAIT_SECONDS:
        await asyncio.sleep(0.5)
    cached = answer.json().get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return Verdict(
        held=refused.status_code == 503 and is_there and answer.status_code == 200 and cached > 0,
        seen=f"refused {refused.status_code}; full for {freed - waited:.0f} s; then served after "
        f"{time.monotonic() - freed:.1f} s, {cached} tokens cached",
    )


async def large_bodies(day: BadDay) -> Verdict:
    """Send bodies that take long to parse: they are refused, and no other stream stands still."""
    await day.start()
    gateway = day.pid("gateway")
    bodies = (
        b'{"model":"builtin:tiny","prompt":[' + b"[[]]," * 5_000_000 + b"[]]}",
        b'{"model":"builtin:tiny","prompt":[' + b"[]," * 8_000_000 + b"[]]}",
        b'{"model":"builtin:tiny","prompt":[' + b"1," * 12_000_000 + b"1]}",
        b'{"model":"builtin:tiny","messages":[' + b'{"role":[{}]},' * 1_700_000 + b"{}]}",
    )
    async with day.streaming() as times:
        headers = {"content-type": "application/json"}
        answers = [await day.http.post("/v1/completions", content=each, headers=headers) for each in bodies]
        codes = [answer.status_code for answer in answers]
        gap = longest(times)
    held = gap < MAX_GAP_SECONDS and all(code in (400, 413) for code in codes) and day.pid("gateway") == gateway
    return Verdict(held=held, seen=f"refused {codes}; longest gap of a stream meanwhile {gap:.2f} s")


async def silent_connections(day: BadDay) -> Verdict:
    """Open more silent connections than descriptors: streams go on, probes answer, and the silent ones are closed."""
    await day.start()
    gateway = day.pid("gateway")
    psutil.Process(gateway).rlimit(psutil.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    host, _, port = day.cluster.http.rpartition(":")
    log_before = len(day.cluster.text())
    with ExitStack() as stack:
        async with day.streaming() as times:
            silent = []
            for _ in range(NUM_SILENT):
                with suppress(OSError):
                    silent.append(stack.enter_context(socket.create_connection((host, int(port)), 1.0)))
            closed = await until(lambda: all(is_closed(each) for each in silent), SILENT_SECONDS)
            gap = longest(times)
        answer = await day.http.get("/health")
    logged = len(day.cluster.text()) - log_before
    held = closed and answer.status_code == 200 and gap < MAX_GAP_SECONDS and logged < 20_000
    how_many = "all" if closed else "not all"
    seen = f"{len(silent)} connections, {how_many} closed; longest gap {gap:.2f} s; {logged} bytes logged"
    return Verdict(held=held and day.pid("gateway") == gateway, seen=seen)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed a connection."""
    connection.setblocking(False)
    try:
        return not connection.recv(1024)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def tenant_flood(day: BadDay) -> Verdict:
    """Send forty long prompts as one tenant: another tenant's turns, short and long, take their turn."""
    await day.start()
    headers = {name: {"authorization": f"Bearer {token}"} for name, token in TOKENS.items()}

    async def ask(tenant: str, tokens: int, number: int) -> tuple[int, float, float]:
        began = time.monotonic()
        prompt = [100 + (place * 7 + number) % 150 for place in range(tokens)]  # they share no beginning
        body = {"model": "builtin:tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        answer = await day.http.post("/v1/completions", json=body, headers=headers[tenant], timeout=QUEUE_SECONDS)
        return answer.status_code, began, time.monotonic()

    await ask("other", 8, NUM_FLOOD)  # so that the rings know of it
    waiting = [asyncio.create_task(ask("flood", FLOOD_TOKENS, number)) for number in range(NUM_FLOOD)]
    await until(lambda: any(task.done() for task in waiting), FLOOD_SECONDS)
    short, long = await asyncio.gather(ask("other", 32, NUM_FLOOD + 1), ask("other", FLOOD_TOKENS, NUM_FLOOD + 2))
    ends = [ended for code, _, ended in await asyncio.gather(*waiting) if code == 200]
    before = sum(ended < long[2] for ended in ends)
    seen = (
        f"short {short[0]} after {short[2] - short[1]:.2f} s, long {long[0]} after {long[2] - long[1]:.2f} s and "
        f"{before} of the flood's {len(ends)} that were served; {NUM_FLOOD - len(ends)} were refused"
    )
    return Verdict(held=short[0] == long[0] == 200 and before <= MAX_BEFORE < len(ends), seen=seen)


async def slow_readers(day: BadDay) -> Verdict:
    """Read nothing of long answers: others wait for nothing, and the gateway's memory is bounded."""
    await day.start()
    host, _, port = day.cluster.http.rpartition(":")
    body = json.dumps(
        {"model": "builtin:tiny", "prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True, "logprobs": 5}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    before = psutil.Process(day.pid("gateway")).memory_info().rss
    with ExitStack() as stack:
        for _ in range(8):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(head + body)
        began = time.monotonic()
        answer = await day.ask("short", tokens=4)
        seconds = time.monotonic() - began
        grown = psutil.Process(day.pid("gateway")).memory_info().rss - before
    held = answer.status_code == 200 and seconds < 10 and grown < 64 << 20
    return Verdict(
        held=held, seen=f"a short turn beside them took {seconds:.2f} s; the gateway grew by {grown / 1e6:.0f} MB"
    )


async def rank_memory(day: BadDay) -> Verdict:
    """Limit a rank's memory: its turns may fail, but then the service gives the same answers as before."""
    await day.start()
    expected = (await day.ask("", tokens=8)).json()["choices"][0]["text"]
    rank = psutil.Process(day.pid("prefill-0 rank 0"))
    limit = rank.memory_info().vms + RANK_BYTES
    rank.rlimit(psutil.RLIMIT_AS, (limit, limit))
    codes = [(await day.ask("", prompt="word " * 1500, tokens=4)).status_code for _ in range(3)]
    await until(lambda: day.pid("prefill-0 rank 0") > 0)
    answer = await day.ask("", tokens=8)
    same = answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected
    replaced = "replaced" if day.pid("prefill-0 rank 0") != rank.pid else "the same process"
    return Verdict(
        held=same, seen=f"long prompts: {codes}; rank: {replaced}; then {'the same answer' if same else answer.text}"
    )


async def double_kills(day: BadDay) -> Verdict:
    """Kill several processes at once under a stream: the client reads the tokens that it would have read."""
    await day.start()
    seen, held = [], True
    sampling = Sampling(temperature=0.0, max_tokens=LONG_ANSWER, ignore_eos=True)
    async with AsyncClient(day.cluster.gateway) as client:

        async def read(tokens: list[int]) -> float:
            times = []
            async with client.stream(list(range(100, 140)), sampling=sampling, timeout=WAIT_SECONDS) as pieces:
                async for piece in pieces:
                    times.append(time.monotonic())
                    tokens += piece.token_ids
            return longest(times)

        expected: list[int] = []
        await read(expected)
        for names in DOUBLE_KILLS:
            tokens: list[int] = []
            reading = asyncio.create_task(read(tokens))
            await until(lambda tokens=tokens: len(tokens) > 10)  # type: ignore[misc]
            day.kill(*names)
            gap = await reading
            held = held and tokens == expected
            seen.append(f"{' + '.join(names)}: {'same' if tokens == expected else 'OTHER'} tokens, gap {gap:.1f} s")
            await until(lambda: all(day.pid(each) for kill in DOUBLE_KILLS for each in kill))
    return Verdict(held=held, seen="; ".join(seen))


async def clock_jumps(day: BadDay) -> Verdict:
    """Set the clock a day ahead, two back and right again under a stream, and kill the router: nobody notices."""
    await day.start()
    (await day.ask("c")).raise_for_status()
    cached, gaps, offsets = [], [], []
    for days in (1, -1, 0):
        async with day.streaming() as times:
            (day.folder / "clock").write_text(str(days))
            day.kill("router")
            response = await day.ask("c")
            if response.status_code != 200:
                raise Unavailable(response.text)
            answer = response.json()
            gaps.append(longest(times))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        offsets.append(round((answer["created"] - time.time()) / 86_400))
    return Verdict(
        held=offsets == [1, -1, 0] and min(cached) > 0 and max(gaps) < MAX_GAP_SECONDS,
        seen=f"clock of the gateway {offsets} days off; tokens cached {cached}; longest gap {max(gaps):.2f} s",
    )


async def killed_starter(day: BadDay) -> Verdict:
    """Kill `ringserve up`: what it leaves is gone once `down` or the next `up` has run."""
    await day.start()
    family = below(day)
    psutil.Process(day.cluster.processes.roots[0]).kill()
    await until(lambda: day.cluster.has_ended)
    await day.cluster.run_command("down", "--name", "chaos")
    gone, alive = await asyncio.to_thread(psutil.wait_procs, family, 20.0)
    left = own_directories(day)
    return Verdict(
        held=not alive and not left, seen=f"{len(gone)} processes gone, {len(alive)} left, {len(left)} directories"
    )


async def up_and_down(day: BadDay) -> Verdict:
    """Start and stop clusters: each leaves nothing, no process, shared memory or directory."""
    shared = set(os.listdir("/dev/shm"))
    left: list[str] = []
    for number in range(day.loops):
        await day.start()
        family = below(day)
        (await day.ask(f"c{number}")).raise_for_status()
        await asyncio.to_thread(day.cluster.stop)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10.0)
        left += [*map(title, alive), *own_directories(day), *sorted(set(os.listdir("/dev/shm")) - shared)]
    return Verdict(held=not left, seen=f"{day.loops} times; left: {', '.join(left) or 'nothing'}")


def below(day: BadDay) -> list[psutil.Process]:
    """Return all processes below `ringserve up`."""
    return [each for root in day.cluster.processes.roots for each in _children(root)]


def _children(root: int) -> Iterable[psutil.Process]:
    with suppress(*GONE):
        return psutil.Process(root).children(recursive=True)
    return ()


def title(process: psutil.Process) -> str:
    with suppress(*GONE):
        return " ".join(process.cmdline())[:60]
    return ""


def own_directories(day: BadDay) -> list[str]:
    """Return the names of the directories that Ray made in the scenario's temporary directory for itself alone."""
    names = (path.name for path in (day.folder / "t").glob(f"{DIRECTORY_PREFIX}*"))
    return [name for name in names if name != shared_directory().name]


SCENARIOS: Mapping[str, Callable[[BadDay], Awaitable[Verdict]]] = {
    "ray-agent": ray_agent,
    "full-disk": full_disk,
    "large-bodies": large_bodies,
    "silent-connections": silent_connections,
    "tenant-flood": tenant_flood,
    "slow-readers": slow_readers,
    "rank-memory": rank_memory,
    "double-kills": double_kills,
    "clock-jumps": clock_jumps,
    "killed-starter": killed_starter,
    "up-and-down": up_and_down,
}


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "bad-days",
        help="a full disk, hostile clients, killed helpers of Ray",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", default=[], choices=SCENARIOS, help="run this one; repeatable")
    parser.add_argument("--rounds", type=int, default=1, help="how often to run all (default: %(default)s)")
    parser.add_argument("--loops", type=int, default=LOOPS, help="clusters of up-and-down (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the scenarios and print a table. Return 1 if one did not hold."""
    table, held = listing("scenario", "held", "seconds", "seen"), True
    for _ in range(options.rounds):
        for name in options.only or SCENARIOS:
            began = time.monotonic()
            verdict = asyncio.run(_run(name, options.loops))
            held = held and verdict.held
            row = (name, "yes" if verdict.held else "NO", f"{time.monotonic() - began:.0f}", verdict.seen)
            print(*row, sep="  ", file=sys.stderr, flush=True)
            table.add_row(*row)
    print_table(console(), table)
    return 0 if held else 1


async def _run(name: str, loops: int) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="b") as folder:
        path = Path(folder)
        (path / "t").mkdir()
        prefix = _small_disk(path / "state-1") if name == "full-disk" else ()
        extra = _tenants(path / "tokens.json") if name == "tenant-flood" else ()
        settings = [word for setting in (*SETTINGS, *extra) for word in ("--set", setting)]
        variables = {"TMPDIR": str(path / "t")} | (_set_clock(path) if name == "clock-jumps" else {})
        cluster = OwnCluster(settings, path, 1, prefix=prefix, variables=variables)
        day = BadDay(cluster, path, loops)
        try:
            return await SCENARIOS[name](day)
        except (httpx2.HTTPError, RingserveError, psutil.Error, KeyError) as error:
            return Verdict(held=False, seen=f"{type(error).__name__}: {error}")
        finally:
            await day.close()


def _tenants(path: Path) -> Sequence[str]:
    """Write the file of tenants as JSON, which is valid YAML -> the setting that names it."""
    hashes = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in TOKENS.items()}
    path.write_text(json.dumps({"tenants": [{"name": n, "tokens": [{"sha256": h}]} for n, h in hashes.items()]}))
    return (f"auth.tokens={path}",)


def _set_clock(folder: Path) -> dict[str, str]:
    """Return variables by which the file `clock` in a folder sets the clock of Python processes."""
    (folder / "clock").write_text("0")
    (folder / "sitecustomize.py").write_text(CLOCK.format(path=str(folder / "clock")))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def _small_disk(directory: Path) -> Sequence[str]:
    """Return the prefix of a command that sees a small disk of its own at a directory. Raises ConfigError."""
    directory.mkdir()
    if sys.platform != "linux":
        raise ConfigError("--only: full-disk needs Linux")
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    mount = f'mount -t tmpfs -o size={DISK_BYTES} none "$0" && exec "$@"'
    return ("unshare", *user, "--mount", "sh", "-c", mount, str(directory))
