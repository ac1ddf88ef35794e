"""`python -m bench soak`: memory of every process of a cluster under mixed load, for as long as wanted.

The bench command line registers it with `add`; `run` starts and stops a cluster of its own and reads its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import psutil

from bench.chaos.cluster import OwnCluster
from bench.options import Subcommands
from ringserve.client import Sampling
from ringserve.client.async_client import AsyncClient
from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.services.cluster.state import GONE
from ringserve.services.offline.terminal import console, listing, print_table

HELP = """Several clients ask at once: lone prompts of all lengths, conversations, forks, structured answers, and
streams that are cut. The resident memory of each process is read all the while; its growth after the warm-up is
reported. The KV cache is small and few conversations are remembered, because both become resident as they fill."""
EXAMPLE = """example:
  python -m bench soak --minutes 10
  python -m bench soak --minutes 60 --clients 8 --set model.path=builtin:smollm2
"""
CLIENTS = 4
MINUTES = 10.0
WARM_UP = 0.3
"""Share of the time before growth counts, in which allocators and caches fill."""
SAMPLE_SECONDS = 5.0
WINDOW = 0.1
"""Share of the time over which memory is averaged, after the warm-up and at the end."""
MAX_GROWTH = 0.02
CALL_SECONDS = 120.0
SETTINGS = (
    "gateway.listen=127.0.0.1:0",
    "gateway.http=",
    "gateway.metrics=",
    "kv_cache.tokens_per_rank=6144",
    "router.max_conversations=64",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Load:
    """Mixed load of some clients on a gateway. `outcomes` counts how turns ended."""

    def __init__(self, target: str, max_tokens: int, vocabulary: int) -> None:
        self._target = target
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self.outcomes = Counter[str]()

    async def run(self, num_clients: int, seconds: float) -> None:
        """Ask until the time is over."""
        deadline = time.monotonic() + seconds
        async with AsyncClient(self._target) as client, asyncio.TaskGroup() as tasks:
            for seed in range(num_clients):
                tasks.create_task(self._ask(client, random.Random(seed), deadline))

    async def _ask(self, client: AsyncClient, chance: random.Random, deadline: float) -> None:
        number = 0
        while time.monotonic() < deadline:
            number += 1
            kind = chance.choice((self._lone, self._lone, self._conversation, self._structured, self._cut))
            try:
                await kind(client, chance, f"soak-{id(chance)}-{number}")
                self.outcomes[kind.__name__.strip("_")] += 1
            except RingserveError as error:
                self.outcomes[type(error).__name__] += 1

    def _prompt(self, chance: random.Random, longest: int = 0) -> list[int]:
        """Return random tokens; the logarithm of their number is uniform, so that short prompts are frequent."""
        length = int(2 ** chance.uniform(3, (longest or self._max_tokens // 2).bit_length() - 1))
        return [chance.randrange(self._vocabulary) for _ in range(length)]

    def _sampling(self, chance: random.Random) -> Sampling:
        return Sampling(max_tokens=chance.randrange(1, 48), temperature=chance.choice((0.0, 1.0)), ignore_eos=True)

    async def _lone(self, client: AsyncClient, chance: random.Random, _: str) -> None:
        await client.ask(self._prompt(chance), sampling=self._sampling(chance), timeout=CALL_SECONDS)

    async def _conversation(self, client: AsyncClient, chance: random.Random, name: str) -> None:
        for turn in range(4):
            options = {"conversation_id": name, "sampling": self._sampling(chance), "timeout": CALL_SECONDS}
            await client.ask(self._prompt(chance, self._max_tokens // 8), **options)  # type: ignore[arg-type]
            if turn == 1:
                await client.fork_conversation(name, f"{name}-fork")
        for each in (name, f"{name}-fork"):
            if chance.random() < 0.5:
                await client.delete_conversation(each)

    async def _structured(self, client: AsyncClient, chance: random.Random, _: str) -> None:
        sampling = Sampling(max_tokens=24, json_schema=SCHEMA)
        await client.ask(self._prompt(chance, self._max_tokens // 8), sampling=sampling, timeout=CALL_SECONDS)

    async def _cut(self, client: AsyncClient, chance: random.Random, _: str) -> None:
        cut_after = chance.randrange(1, 6)
        async with client.stream(
            self._prompt(chance), sampling=Sampling(max_tokens=64, ignore_eos=True), timeout=CALL_SECONDS
        ) as stream:
            async for _piece in stream:
                cut_after -= 1
                if not cut_after:
                    break


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Mean resident bytes of a process after the warm-up and at the end."""

    process: str
    pid: int
    early: float
    late: float

    @property
    def share(self) -> float:
        return self.late / self.early - 1


class Memory:
    """Samples of the resident bytes of the processes below one, by name and pid."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self.samples: dict[tuple[str, int], list[tuple[float, int]]] = {}

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_SECONDS)  # the interval of the measurement

    def look(self) -> None:
        now = time.monotonic()
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(*GONE):
                found = self.samples.setdefault((_title(process), process.pid), [])
                found.append((now, process.memory_info().rss))

    def growths(self, began: float, seconds: float) -> Iterator[Growth]:
        """Yield the growth of each process that ran the whole time."""
        window = WINDOW * seconds
        for (name, pid), found in sorted(self.samples.items()):
            early = [size for at, size in found if 0 <= at - began - WARM_UP * seconds < window]
            late = [size for at, size in found if at - began >= seconds - window]
            if early and late:
                yield Growth(process=name, pid=pid, early=mean(early), late=mean(late))


def _title(process: psutil.Process) -> str:
    """Return a short name: "ray::router", "gcs_server", or the first module on the command line."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].strip()[:40].split(".")[0]
    modules = [word for word in words[1:] if word.startswith("ringserve.") or word.endswith(".py")]
    return Path(modules[0]).name if modules else process.name()


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "soak",
        help="memory of all processes under mixed load",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time under load (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="turns at a time (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `ringserve up`")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the soak and print its table. Return 1 if a process grows by more than 2 %."""
    settings = [*SETTINGS, *options.set]
    with tempfile.TemporaryDirectory(prefix="ringserve-soak-") as folder:
        arguments = [word for setting in settings for word in ("--set", setting)]
        cluster = OwnCluster(arguments, Path(folder), 1)
        try:
            growths = asyncio.run(_soak(cluster, 60 * options.minutes, options.clients))
        finally:
            cluster.stop()
    if not growths:
        raise Unavailable("no process was measured both after the warm-up and at the end; give more --minutes")
    table = listing("process", "pid", f"MB after {WARM_UP:.0%}", "MB at the end", "growth")
    for each in sorted(growths, key=lambda each: each.share, reverse=True):
        table.add_row(
            each.process, str(each.pid), f"{each.early / 1e6:.1f}", f"{each.late / 1e6:.1f}", f"{each.share:+.1%}"
        )
    print_table(console(), table)
    worst = max(each.share for each in growths)
    verdict = "met" if worst <= MAX_GROWTH else "MISSED"
    print(f"growth of the worst process: {worst:.1%}, at most {MAX_GROWTH:.0%}: {verdict}")
    return int(worst > MAX_GROWTH)


async def _soak(cluster: OwnCluster, seconds: float, num_clients: int) -> list[Growth]:
    await cluster.start(lambda line: print(line, flush=True))
    async with AsyncClient(cluster.gateway) as client:
        info = await client.model_info()
    load = Load(cluster.gateway, min(info.max_context_length, 4096), info.vocab_size)
    memory, began = Memory(cluster.processes.roots[0]), time.monotonic()
    watch = asyncio.create_task(memory.run())
    try:
        await load.run(num_clients, seconds)
    finally:
        watch.cancel()
        memory.look()
    print(", ".join(f"{name}: {count}" for name, count in sorted(load.outcomes.items())))
    return list(memory.growths(began, seconds))
