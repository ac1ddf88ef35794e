"""Ray actors: the only place where plain classes become actors.

`RankActor` hosts a rank. `HostActor` hosts an object that `services` composes: a leader or the router, with its gRPC
server. Ranks outlive the leader that made them: the next leader takes them over, with the models that they have loaded.
If no leader comes, they end by themselves.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ringserve.cp_core.errors import ConfigError, RingserveError, StaleIncarnation, Unavailable
from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.orchestration.ring.calls import LANES, Calls, Lanes, RankFailed, calls_of, listen_for_calls
from ringserve.orchestration.tasks import beside_others
from ringserve.views import RingRates
from ringserve.workers.kv.arrivals import Arrivals
from ringserve.workers.protocol.ranks import (
    RankEndpoints,
    RankInfo,
    RankSettings,
    RankSpec,
    RankStatus,
    RingSpec,
    rank_variables,
)
from ringserve.workers.protocol.steps import DecodeCommand, DecodeEvents, PrefillOutput, PrefillStep
from ringserve.workers.protocol.transfers import BlockPair, KvEnds, KvExpect, KvSend, TransferKey, TransferReport

if TYPE_CHECKING:
    from ringserve.workers.rank.worker import RankWorker

log = logging.getLogger(__name__)

CALLS_SECONDS = 5.0
"""Seconds that a leader and a rank have to connect for calls."""

RANK_NICENESS = 15
"""Nice value of a rank, by default that of all of Ray's workers. Router and leaders have 0: they come before ranks."""
OUTPUT_VARIABLE = "RINGSERVE_WORKER_OUTPUT"
"""Environment variable with the number of an open file for an actor's output, set by `services.cluster.fork_server`."""
LEASE_SECONDS = 180.0
"""Seconds after which a rank without a leader ends: long enough for another leader, even in another pod."""
LEASE_LOOK_SECONDS = 15.0
"""Seconds between two calls by which a leader renews its ranks' leases."""
START_NICENESS = 5
"""Addition to a rank's nice value while it imports: it gets a third of a computing process's processor time.

A rank that takes a lost one's place imports for a second or more just when those that live compute the lost turns.
"""


class Hosted(Protocol):
    """Object that a HostActor hosts."""

    async def start(self) -> str:
        """Serve; return the endpoint HOST:PORT."""

    async def measure(self) -> None:
        """Measure its own rates, once all processes that share the machine have started."""

    async def wait_event(self) -> RingEvent:
        """Return the next event for which the starter must do something for a ring; it may never come."""

    async def stop(self) -> None:
        """Stop serving and free everything. Idempotent."""


class HostActor:
    """Async actor around one composed object.

    `start` builds the object, not the constructor, because Ray hands on a constructor's error as text alone.
    """

    _hosted: Hosted

    def __init__(self, compose: Callable[[], Hosted]) -> None:
        write_as_starter()
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
        """Return the process id, by which the starter kills this process if it hangs."""
        return os.getpid()

    async def wait_event(self) -> RingEvent:
        """Return the next event of the hosted object. The call also fails when this actor dies."""
        await self._is_composed.wait()
        return await self._hosted.wait_event()


class RankActor:
    """One rank. One thread computes; transfers wait in threads of their own; control calls always get an answer.

    A thread of its own tells the leader that the rank lives, whatever the other threads wait for. Calls name the
    incarnation that they are meant for: a dead leader's call may arrive after another leader has taken over.
    """

    def __init__(self) -> None:
        write_as_starter()
        give_way()
        self._worker = beside_others(_make_worker, START_NICENESS)
        self._lanes = Lanes()
        self._incarnation = ""
        self._settings: RankSettings | None = None  # as its first leader gave them
        self._note: object = None
        self._renewed_at = time.monotonic()
        threading.Thread(target=self._end_without_lease, name="ringserve-lease", daemon=True).start()

    @ray.method(concurrency_group="control")
    def start(self, spec: RankSpec) -> RankInfo:
        """Start the rank, which listens at its node's address unless the settings name another."""
        self._incarnation, self._settings = spec.incarnation, spec.settings
        line = f"%(asctime)s {spec.ring} rank {spec.rank} %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(format=line, force=True)
        listen_host = spec.settings.listen_host or ray.util.get_node_ip_address()
        return self._worker.start(replace(spec, settings=replace(spec.settings, listen_host=listen_host)))

    @ray.method(concurrency_group="control")
    def renew(self, spec: RankSpec) -> RankInfo:
        """Begin another incarnation, at the same address.

        Raises Unavailable if the rank has not started, or was started with other settings than the leader's.
        """
        if self._settings not in (spec.settings, spec.with_helix().settings):
            raise Unavailable(f"rank {spec.rank} of ring {spec.ring} was started with other settings")
        self._incarnation = spec.incarnation
        return self._worker.renew(replace(spec, settings=self._worker.parts.spec.settings))

    @ray.method(concurrency_group="watch")
    def home(self) -> tuple[str, int]:
        """Return the id of this process's node, and the process id. A leader's calls at intervals renew the lease."""
        self._renewed_at = time.monotonic()
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="watch")
    def status(self) -> RankStatus:
        return self._worker.status()

    @ray.method(concurrency_group="control")
    def remember(self, note: object) -> None:
        """Keep something for the leader that takes this rank over."""
        self._note = note

    @ray.method(concurrency_group="control")
    def recall(self) -> object:
        """Return the measurements that a leader had this rank keep, if any."""
        return self._note

    @ray.method(concurrency_group="control")
    def listen_for_calls(self, incarnation: str, secret: str, timeout: float) -> str:
        """Let a leader that knows the secret call by a connection; return the endpoint. Raises Unavailable."""
        settings = self._worker.parts.spec.settings
        rendezvous = replace(calls_of(incarnation, secret, timeout), tls=settings.tls)
        return listen_for_calls(settings.listen_host, rendezvous, self._lanes, partial(self._call, incarnation))

    @ray.method(concurrency_group="compute")
    def compute(self, incarnation: str, method: str, *arguments: Any) -> Any:
        return self._call(incarnation, method, *arguments)

    @ray.method(concurrency_group="transfer")
    def transfer(self, incarnation: str, method: str, *arguments: Any) -> Any:
        return self._call(incarnation, method, *arguments)

    @ray.method(concurrency_group="control")
    def control(self, incarnation: str, method: str, *arguments: Any) -> Any:
        return self._call(incarnation, method, *arguments)

    def _call(self, incarnation: str, method: str, *arguments: Any) -> Any:
        if incarnation != self._incarnation:
            raise StaleIncarnation(f"{method} was asked of {incarnation}, and this rank is one of {self._incarnation}")
        return getattr(self._worker, method)(*arguments)

    def _end_without_lease(self) -> None:
        """End this process, and free the ring's places, once no leader has renewed the lease for LEASE_SECONDS."""
        while (left := self._renewed_at + LEASE_SECONDS - time.monotonic()) > 0:
            time.sleep(left)
        with suppress(RayError):
            if (places := get_current_placement_group()) is not None:
                remove_placement_group(places)
        os._exit(1)


def _make_worker() -> RankWorker:
    os.environ.update(rank_variables(os.environ))
    # The import is here because leaders import this file and must stay free of torch. During the import garbage
    # collections would find nothing and take a sixth of the time. Frozen modules make later collections faster.
    gc.disable()
    from ringserve.workers.rank.worker import RankWorker

    gc.freeze()
    gc.enable()
    return RankWorker()


def write_as_starter() -> None:
    """Send this process's output to the file for errors of whoever started Ray, if OUTPUT_VARIABLE names it.

    If it does not, Ray's log monitor forwards the output.
    """
    if number := os.environ.pop(OUTPUT_VARIABLE, ""):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(int(number), descriptor)
        os.close(int(number))


def give_way() -> None:
    """Give all threads of this process, and threads that they start, the nice value of a rank."""
    tasks = Path("/proc/self/task")
    for thread in (int(each.name) for each in tasks.iterdir()) if tasks.exists() else (0,):
        with suppress(ProcessLookupError):
            niceness = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, RANK_NICENESS))


def _remote(kind: type, title: str, **options: Any) -> Any:
    """Make an actor class of `kind` whose processes are called `title`.

    Ray shows the name of an actor's class in `ps`, in `ray list actors` and before the actor's log lines: every actor
    gets a class of its own.
    """
    return ray.remote(max_restarts=0, **options)(type(title, (kind,), {"__module__": __name__}))


class RayRank:
    """`RankPort` on an actor. Errors of the rank are raised as they are; errors of Ray become Unavailable.

    Once the rank has started, calls go over a direct connection; if there is none, or it has ended, they go through
    Ray.
    """

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self._name = name
        self._actor = actor
        self._process: psutil.Process | None = None  # if it is on this node
        self._incarnation = ""
        self._arrivals = Arrivals(self._poll_kv)
        self._calls: Calls | None = None

    async def _call(self, lane: str, method: str, timeout: float | None, *arguments: Any) -> Any:
        calls = self._calls
        if calls is None or calls.is_closed:
            call = getattr(self._actor, lane).remote(self._incarnation, method, *arguments)
            return await self._answer(call, method, timeout)
        async with self._telling(method, timeout):
            return await calls.ask(lane, method, *arguments)

    async def _answer(self, reference: ray.ObjectRef[Any], method: str, timeout: float | None) -> Any:
        async with self._telling(method, timeout):
            return await asyncio.wrap_future(reference.future())

    @asynccontextmanager
    async def _telling(self, method: str, timeout: float | None) -> AsyncIterator[None]:
        """Raise errors of the rank as they are, and others of the call as Unavailable."""
        try:
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 can swallow a cancellation
                yield
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer {method} within {timeout:.0f} s") from None
        except RankFailed as error:
            raise Unavailable(f"{self._name} failed in {method}: {error}") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RingserveError):
                raise cause from None
            raise Unavailable(f"{self._name} failed in {method}: {type(cause).__name__}: {cause}") from error
        except (OSError, RayActorError, GetTimeoutError, RayError) as error:
            raise Unavailable(f"{self._name} died") from error

    async def start(self, spec: RankSpec, timeout: float) -> RankInfo:
        return await self._begin("start", spec, timeout)

    async def renew(self, spec: RankSpec, timeout: float) -> RankInfo:
        return await self._begin("renew", spec, timeout)

    async def _begin(self, method: str, spec: RankSpec, timeout: float) -> RankInfo:
        actor: Any = self._actor  # Ray's stubs do not know its class, and type its methods as never returning
        self.end_calls()
        # The rank numbers the ends of transfers from 0 again.
        self._arrivals.close(f"{self._name} left its incarnation {self._incarnation}")
        self._arrivals = Arrivals(self._poll_kv)
        self._incarnation = spec.incarnation
        info: RankInfo = await self._answer(getattr(actor, method).remote(spec), method, timeout)
        self._calls = await self._begin_calls(spec, min(timeout, CALLS_SECONDS))
        if self._process is None:
            node, pid = await self._answer(actor.home.remote(), "home", timeout)
            if node == ray.get_runtime_context().get_node_id():
                with suppress(psutil.NoSuchProcess):
                    self._process = psutil.Process(pid)
        return info

    async def _begin_calls(self, spec: RankSpec, timeout: float) -> Calls | None:
        rendezvous = replace(calls_of(spec.incarnation, secrets.token_hex(32), timeout), tls=spec.settings.tls)
        actor: Any = self._actor  # as in `_begin`
        listening = actor.listen_for_calls.remote(spec.incarnation, rendezvous.secret, timeout)
        try:
            endpoint: str = await self._answer(listening, "listen_for_calls", timeout)
            return await asyncio.to_thread(Calls, endpoint, rendezvous)
        except (ConfigError, Unavailable) as error:
            log.warning(
                "%s has no direct connection and is called through Ray, which costs more: %s",
                self._name,
                error,
            )
            return None

    def end_calls(self) -> None:
        """Close the connection, if there is one. Idempotent."""
        if self._calls is not None:
            self._calls.close()

    async def remember(self, note: object, timeout: float) -> None:
        await self._answer(self._actor.remember.remote(note), "remember", timeout)

    async def recall(self, timeout: float) -> object:
        return await self._answer(self._actor.recall.remote(), "recall", timeout)

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

    def renew_lease(self) -> None:
        """Ask the rank where it is, and do not wait for the answer."""
        self._actor.home.remote()

    async def kill(self) -> None:
        """End the process at once, and free everything it holds.

        Ray asks a process to end, and kills it only 5 s later. Until then a process that hangs would hold its memory,
        and its peers' transfers, so a rank on this node is killed directly. On other nodes only Ray's way is left.
        """
        self._arrivals.close(f"{self._name} died")
        self.end_calls()
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()  # psutil refuses an id that is another process's by now
        try:
            ray.kill(self._actor, no_restart=True)
        except (RayError, ValueError):
            return  # the process had ended already


class RayRanks:
    """`RankFactory` that puts a ring's processes into one placement group.

    Each process has `resources` (e.g. {"CPU": 1}).

    The `tp` processes that share the heads of the same tokens are on one host, because they add up results twice a
    layer. The group and its processes outlive the leader that made them. The next leader finds them by names that begin
    with the ring's: RING.HEX, and RING.HEX/RANK/COUNT.
    """

    def __init__(self, name: str, resources: dict[str, float], tp: int = 1, strategy: str = "PACK") -> None:
        self._name = name
        self._resources = resources
        self._tp = tp
        self._strategy = strategy
        self._ring: PlacementGroup | None = None
        self._group = ""
        self._num_made = 0
        self._ranks: list[RayRank] = []
        self._leases: asyncio.Task[None] | None = None

    async def create(self, num_ranks: int, timeout: float) -> Sequence[RayRank]:
        """Make the actors of all ranks. Raises Unavailable when the cluster has no room for the whole ring."""
        free_places(self._name)
        group = self._group = f"{self._name}.{uuid.uuid4().hex}"
        bundles = self._bundles(num_ranks)
        ring = self._ring = placement_group(bundles, strategy=self._strategy, name=group, lifetime="detached")
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(ring.ready().future())
        except TimeoutError:
            await self.close()
            raise Unavailable(
                f"ring {self._name} needs {len(bundles)} places of {bundles[0]} in the Ray cluster; "
                f"there was no room within {timeout:.0f} s"
            ) from None
        except RayError as error:
            await self.close()
            raise Unavailable(f"the placement group of ring {self._name} failed: {error}") from error
        return self._hold([self._rank(ring, index) for index in range(num_ranks)])

    async def adopt(self, num_ranks: int) -> Sequence[RayRank]:
        """Return the ranks of this ring that a dead leader left; empty if one is missing, or has other resources."""
        for group, ring in own_places(self._name).items():
            counts = dict(sorted(_place_of(name) for name in list_named_actors() if name.startswith(f"{group}/")))
            if ring.bundle_specs != self._bundles(num_ranks) or counts.keys() != set(range(num_ranks)):
                continue
            try:
                actors = [ray.get_actor(f"{group}/{index}/{counts[index]}") for index in range(num_ranks)]
            except ValueError:  # one has ended meanwhile
                continue
            self._ring, self._group, self._num_made = ring, group, max(counts.values())
            return self._hold([self._port(index, actor) for index, actor in enumerate(actors)])
        return ()

    def _hold(self, ranks: list[RayRank]) -> Sequence[RayRank]:
        """Renew the ranks' leases until the ring is closed: one may wait for minutes while another loads its model."""
        self._ranks = ranks
        if self._leases is None:
            self._leases = asyncio.create_task(self._renew_leases())
        return list(ranks)

    async def _renew_leases(self) -> None:
        while True:
            for rank in self._ranks:
                rank.renew_lease()
            await asyncio.sleep(LEASE_LOOK_SECONDS)

    async def replace(self, lost: Sequence[int], timeout: float) -> Sequence[RayRank]:
        """Kill lost ranks, and make others in their places. Ray starts each when its place is free."""
        assert self._ring is not None, "a ring was created"
        for index in lost:
            await self._ranks[index].kill()
            self._ranks[index] = self._rank(self._ring, index)
        return list(self._ranks)

    def _bundles(self, num_ranks: int) -> list[dict[str, float]]:
        return [{name: self._tp * amount for name, amount in self._resources.items()}] * (num_ranks // self._tp)

    def _port(self, index: int, actor: ActorHandle[Any]) -> RayRank:
        return RayRank(f"rank {index} of ring {self._name}", actor)

    def _rank(self, ring: PlacementGroup, index: int) -> RayRank:
        bundle = index // self._tp
        place = PlacementGroupSchedulingStrategy(placement_group=ring, placement_group_bundle_index=bundle)
        lanes = LANES | {"watch": 1}
        self._num_made += 1
        actor = _remote(RankActor, f"{self._name} rank {index}", concurrency_groups=lanes).options(
            name=f"{self._group}/{index}/{self._num_made}",
            lifetime="detached",
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy=place,
        )
        return self._port(index, actor.remote())

    async def close(self) -> None:
        """Free the places of the ranks. Idempotent."""
        for rank in self._ranks:
            rank.end_calls()
        if self._leases is not None:
            self._leases.cancel()
            self._leases = None
        if self._ring is not None:
            remove_placement_group(self._ring)
            self._ring = None


def _place_of(name: str) -> tuple[int, int]:
    """Return the rank's number from an actor's name, and the actor's number among all that were made for the ring."""
    index, count = name.split("/")[1:]
    return int(index), int(count)


def _all_places() -> dict[str, PlacementGroup]:
    """Return the placement groups of the rings of this namespace, by name.

    Ray's table lists all namespaces. A ring of the same name in another namespace belongs to another deployment.
    """
    found = {}
    for each in placement_group_table().values():
        if "." in each["name"] and each["state"] != "REMOVED":
            with suppress(ValueError):  # not in this namespace, or removed meanwhile
                found[each["name"]] = get_placement_group(each["name"])
    return found


def own_places(ring: str) -> dict[str, PlacementGroup]:
    """Return the placement groups that leaders of a ring have left, by name."""
    return {name: places for name, places in _all_places().items() if name.rpartition(".")[0] == ring}


def free_places(ring: str) -> None:
    """End the ranks that leaders of a ring have left, and free their places."""
    for places in own_places(ring).values():
        remove_placement_group(places)


def free_places_of_others(rings: Collection[str]) -> None:
    """End the ranks of this namespace's rings that are not in `rings`: an earlier configuration had them."""
    for name, places in _all_places().items():
        if name.rpartition(".")[0] not in rings:
            remove_placement_group(places)


def host(name: str, title: str, compose: Callable[[], Hosted]) -> Any:
    """Make an actor called `name` around the object that `compose` builds, on the caller's node.

    Its process is called `title`. It takes no CPU from the cluster's count.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _remote(HostActor, title).options(name=name, num_cpus=0, scheduling_strategy=here).remote(compose)
