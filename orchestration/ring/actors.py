"""Ray actors: the only place where plain classes become actors.

`RankActor` hosts a rank. `HostActor` hosts an object that `services` composes: a leader or the router, with its gRPC
server. Ranks belong to the leader that made them and die with it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.views import RingRates
from ringserve.workers.kv.arrivals import Arrivals
from ringserve.workers.protocol.decode_commands import DecodeCommand, DecodeEvents
from ringserve.workers.protocol.prefill_steps import PrefillOutput, PrefillStep
from ringserve.workers.protocol.ranks import RankEndpoints, RankInfo, RankSpec, RankStatus, RingSpec
from ringserve.workers.protocol.transfers import BlockPair, KvEnds, KvExpect, KvSend, TransferKey, TransferReport

if TYPE_CHECKING:
    from ringserve.workers.rank.worker import RankWorker

T = TypeVar("T")

KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
CACHED_KERNELS = 128
"""Kernels that torch and oneDNN keep each, by the shape of a matrix product. A layer has about seven shapes for each
number of rows. Their own 1,024 take a gigabyte after some hundred prompts; to make a kernel again takes about 1 ms."""
RANK_NICENESS = 15
"""Nice value of a rank, which is Ray's own for all its workers: router and leaders come before what computes."""
START_NICENESS = 5
"""Addition to a rank's nice value while it imports: the imports get a third of what each process that computes gets."""


class Hosted(Protocol):
    """Object that a HostActor hosts."""

    async def start(self) -> str:
        """Serve; return the endpoint HOST:PORT."""

    async def measure(self) -> None:
        """Measure its own rates, once all processes that share the machine have started."""

    async def wait_event(self) -> RingEvent:
        """Return when the starter has something to do for a ring, which may be never."""

    async def stop(self) -> None:
        """Stop serving and free everything. Idempotent."""


class HostActor:
    """Async actor around one composed object. `start` builds it: Ray hands on a constructor's error as text alone."""

    _hosted: Hosted

    def __init__(self, compose: Callable[[], Hosted]) -> None:
        self._compose = compose
        self._is_composed = asyncio.Event()

    async def start(self) -> str:
        self._hosted = self._compose()
        self._is_composed.set()
        return await self._hosted.start()

    async def measure(self) -> None:
        await self._hosted.measure()

    async def stop(self) -> None:
        if self._is_composed.is_set():
            await self._hosted.stop()

    async def pid(self) -> int:
        """Return the process id, by which the starter ends a process that stands still."""
        return os.getpid()

    async def wait_event(self) -> RingEvent:
        """Return the next event of the hosted object. The call also fails when this actor dies."""
        await self._is_composed.wait()
        return await self._hosted.wait_event()


class RankActor:
    """One rank. One thread computes; transfers wait in threads of their own; control calls always get an answer.

    A thread of its own tells the leader that the rank lives, whatever the other threads wait for.
    """

    def __init__(self) -> None:
        give_way()
        self._worker = beside_others(_make_worker)

    @ray.method(concurrency_group="control")
    def start(self, spec: RankSpec) -> RankInfo:
        """Start the rank, which listens at its node's address unless the settings name another."""
        listen_host = spec.settings.listen_host or ray.util.get_node_ip_address()
        return self._worker.start(replace(spec, settings=replace(spec.settings, listen_host=listen_host)))

    @ray.method(concurrency_group="control")
    def renew(self, spec: RankSpec) -> RankInfo:
        """Begin another incarnation, at the address of before."""
        return self._worker.renew(replace(spec, settings=self._worker.parts.spec.settings))

    @ray.method(concurrency_group="watch")
    def home(self) -> tuple[str, int]:
        """Return the id of this process's node, and its own there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="watch")
    def status(self) -> RankStatus:
        return self._worker.status()

    @ray.method(concurrency_group="compute")
    def compute(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="transfer")
    def transfer(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="control")
    def control(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)


def _make_worker() -> RankWorker:
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(CACHED_KERNELS))
    # The import is here because leaders import this file and must stay free of torch. Garbage collections during it
    # would find nothing and take a sixth of its time; the frozen modules speed up later collections.
    gc.disable()
    from ringserve.workers.rank.worker import RankWorker

    gc.freeze()
    gc.enable()
    return RankWorker()


def give_way() -> None:
    """Give all threads of this process the nice value of a rank, and those that they begin."""
    tasks = Path("/proc/self/task")
    for thread in (int(each.name) for each in tasks.iterdir()) if tasks.exists() else (0,):
        with suppress(ProcessLookupError):
            niceness = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, RANK_NICENESS))


def beside_others(work: Callable[[], T]) -> T:
    """Return what `work` returns, done in a thread that leaves busy processors to others, as far as they are short.

    A rank that takes a lost one's place imports for a second of processor time and more, just when those that live
    compute the lost turns. On Linux each thread has a priority of its own, which none may raise: so the thread ends,
    and must begin no other that stays.
    """
    with ThreadPoolExecutor(1, "ringserve-start", initializer=_lower_priority) as threads:
        return threads.submit(work).result()


def _lower_priority() -> None:
    thread = threading.get_native_id()  # Linux knows a thread by an id like a process's
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + START_NICENESS)


def _remote(kind: type, title: str, **options: Any) -> Any:
    """Make an actor class of `kind` whose processes are called `title`.

    Ray shows the name of an actor's class in `ps`, in `ray list actors` and before the actor's log lines: every actor
    gets a class of its own.
    """
    return ray.remote(max_restarts=0, **options)(type(title, (kind,), {"__module__": __name__}))


class RayRank:
    """`RankPort` on an actor. Errors of the rank are raised as they are; errors of Ray become Unavailable."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self._name = name
        self._actor = actor
        self._process: psutil.Process | None = None  # where it is on this node
        self._arrivals = Arrivals(self._poll_kv)

    async def _call(self, lane: str, method: str, timeout: float | None, *arguments: Any) -> Any:
        return await self._answer(getattr(self._actor, lane).remote(method, *arguments), method, timeout)

    async def _answer(self, reference: ray.ObjectRef[Any], method: str, timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 can swallow a cancellation
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer {method} within {timeout:.0f} s") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RingserveError):
                raise cause from None
            raise Unavailable(f"{self._name} failed in {method}: {type(cause).__name__}: {cause}") from error
        except (RayActorError, GetTimeoutError, RayError) as error:
            raise Unavailable(f"{self._name} died") from error

    async def start(self, spec: RankSpec, timeout: float) -> RankInfo:
        actor: Any = self._actor  # for Ray's stubs, a method of a class that they do not know never returns
        info: RankInfo = await self._answer(actor.start.remote(spec), "start", timeout)
        node, pid = await self._answer(actor.home.remote(), "home", timeout)
        if node == ray.get_runtime_context().get_node_id():
            with suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(pid)
        return info

    async def renew(self, spec: RankSpec, timeout: float) -> RankInfo:
        return await self._answer(self._actor.renew.remote(spec), "renew", timeout)

    async def open_endpoints(self, timeout: float) -> RankEndpoints:
        return await self._call("control", "open_endpoints", timeout)

    async def join(self, ring: RingSpec, timeout: float) -> None:
        await self._call("compute", "join", timeout, ring)

    async def probe(self, timeout: float) -> RingRates:
        return await self._call("compute", "probe", timeout)

    async def probe_between_steps(self, timeout: float) -> RingRates:
        return await self._call("control", "probe_between_steps", timeout + 5, timeout)

    async def prefill(self, step: PrefillStep, timeout: float) -> PrefillOutput:
        return await self._call("compute", "prefill", timeout, step)

    async def prefill_within(self, step: PrefillStep, timeout: float) -> PrefillOutput | None:
        return await self._call("transfer", "prefill_within", timeout + 5, step, timeout)

    async def finish_sends(self, key: TransferKey, timeout: float) -> TransferReport:
        return await self._call("transfer", "finish_sends", timeout + 5, key, timeout)

    async def abandon_send(self, key: TransferKey, timeout: float) -> None:
        await self._call("control", "abandon_send", timeout, key)

    async def send_kv(self, send: KvSend, timeout: float) -> TransferReport:
        return await self._call("transfer", "send_kv", timeout + 5, send, timeout)

    async def expect_kv(self, expect: KvExpect, timeout: float) -> None:
        self._arrivals.expect(expect.key)
        try:
            await self._call("control", "expect_kv", timeout, expect)
        except BaseException:
            self._arrivals.drop(expect.key)
            raise

    async def await_kv(self, key: TransferKey, timeout: float) -> TransferReport:
        return await self._arrivals.wait(key, timeout)

    async def _poll_kv(self, after: int, wait_seconds: float) -> KvEnds:
        return await self._call("control", "poll_kv", wait_seconds + 30, after, wait_seconds)

    async def drop_kv(self, key: TransferKey, timeout: float) -> None:
        self._arrivals.drop(key)
        await self._call("control", "drop_kv", timeout, key)

    async def copy_blocks(self, pairs: Sequence[BlockPair], timeout: float) -> None:
        await self._call("control", "copy_blocks", timeout, list(pairs))

    async def prepare_grammar(self, grammar: str, timeout: float) -> None:
        await self._call("control", "prepare_grammar", timeout, grammar)

    async def submit(self, commands: Sequence[DecodeCommand], timeout: float) -> None:
        await self._call("control", "submit", timeout, list(commands))

    async def poll(self, after: int, wait_seconds: float, timeout: float) -> DecodeEvents:
        return await self._call("control", "poll", timeout, after, wait_seconds)

    async def status(self, timeout: float) -> RankStatus:
        return await self._answer(self._actor.status.remote(), "status", timeout)

    async def run_decode(self) -> None:
        await self._call("compute", "run_decode", None)

    async def kill(self) -> None:
        """End the process at once, and free everything it holds.

        Ray asks a process to end, and kills it 5 s later: one that stands still would hold its memory, and its peers'
        transfers, until then. On other nodes it does.
        """
        self._arrivals.close(f"{self._name} died")
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()  # psutil refuses an id that is another process's by now
        try:
            ray.kill(self._actor, no_restart=True)
        except (RayError, ValueError):
            return  # the process had ended already


class RayRanks:
    """`RankFactory` that puts a ring's processes into one placement group, each with `resources` (e.g. {"CPU": 1}).

    The `tp` processes that share the heads of the same tokens are on one host: they sum twice a layer.
    """

    def __init__(self, name: str, resources: dict[str, float], tp: int = 1, strategy: str = "PACK") -> None:
        self._name = name
        self._resources = resources
        self._tp = tp
        self._strategy = strategy
        self._ring: PlacementGroup | None = None
        self._ranks: list[RayRank] = []

    async def create(self, num_ranks: int, timeout: float) -> Sequence[RayRank]:
        """Make the actors of all ranks. Raises Unavailable when the cluster has no room for the whole ring."""
        self._remove_leftovers()
        name = f"{self._name}.{uuid.uuid4().hex}"
        bundle = {name: self._tp * amount for name, amount in self._resources.items()}
        bundles = [bundle] * (num_ranks // self._tp)
        ring = self._ring = placement_group(bundles, strategy=self._strategy, name=name)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(ring.ready().future())
        except TimeoutError:
            await self.close()
            raise Unavailable(
                f"ring {self._name} needs {len(bundles)} places of {bundle} in the Ray cluster; "
                f"there was no room within {timeout:.0f} s"
            ) from None
        except RayError as error:
            await self.close()
            raise Unavailable(f"the placement group of ring {self._name} failed: {error}") from error
        self._ranks = [self._rank(ring, index) for index in range(num_ranks)]
        return self._ranks

    async def replace(self, lost: Sequence[int], timeout: float) -> Sequence[RayRank]:
        """Kill lost ranks, and make others in their places. Ray starts each when its place is free."""
        assert self._ring is not None, "a ring was created"
        for index in lost:
            await self._ranks[index].kill()
            self._ranks[index] = self._rank(self._ring, index)
        return list(self._ranks)

    def _remove_leftovers(self) -> None:
        """Free the places of a dead leader of this ring, which Ray holds for as long as the cluster lives.

        The table lists all namespaces. A ring of the same name in another namespace belongs to another deployment.
        """
        for ring in placement_group_table().values():
            if not ring["name"].startswith(f"{self._name}.") or ring["state"] == "REMOVED":
                continue
            try:
                own = get_placement_group(ring["name"])
            except ValueError:  # not in this namespace, or removed meanwhile
                continue
            remove_placement_group(own)

    def _rank(self, ring: PlacementGroup, index: int) -> RayRank:
        bundle = index // self._tp
        place = PlacementGroupSchedulingStrategy(placement_group=ring, placement_group_bundle_index=bundle)
        lanes = {"compute": 1, "transfer": 64, "control": 16, "watch": 1}
        actor = _remote(RankActor, f"{self._name} rank {index}", concurrency_groups=lanes).options(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy=place,
        )
        return RayRank(f"rank {index} of ring {self._name}", actor.remote())

    async def close(self) -> None:
        """Free the places of the ranks. Idempotent."""
        if self._ring is not None:
            remove_placement_group(self._ring)
            self._ring = None


def host(name: str, title: str, compose: Callable[[], Hosted]) -> Any:
    """Make an actor called `name` around the object that `compose` builds, on the caller's node.

    Its process is called `title`. It takes no CPU from the cluster's count.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _remote(HostActor, title).options(name=name, num_cpus=0, scheduling_strategy=here).remote(compose)
