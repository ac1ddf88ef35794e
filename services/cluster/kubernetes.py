"""Rolling restart of a release on Kubernetes, by kubectl: pods of one ring after the other take their new template.

KubeRay makes new pods from the template of the RayCluster, and leaves those that run as they are. So an upgrade is done
by deleting pods: each drains its ring first, by its own hook. The head goes last. All pods are replaced together in two
cases: if the head's end stops all rings because Ray does not store its state, or if the release changes, because pods
of different releases do not serve each other. `ringserve restart --kubernetes` calls it.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringserve.cp_core.errors import ConfigError, DeadlineExceeded, NotFound, Unavailable

Object = Mapping[str, Any]
"""A Kubernetes object, as JSON."""

CALL_SECONDS = 60.0
POLL_SECONDS = 2.0
GRACE_SECONDS = 60.0
"""Seconds beyond its own grace period for a pod to be gone."""
HEAD_GROUP = "head"
INDEX = "ray.io/worker-group-replica-index"
VERSION = "app.kubernetes.io/version"
CONFIG = "/etc/ringserve/config.yaml"
ROUTER_PORT = 50050
JOURNAL = "journal"
CONFIG_VOLUME = "config"
"""Names of two volumes of the chart. The name of CONFIG_VOLUME's ConfigMap changes with its content."""
STORAGE = "RAY_gcs_storage"
NOT_COMPARED = frozenset({"command", "args", "name"})
"""Fields of a container that KubeRay writes itself."""

QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|[MGTPE]|[KMGTPE]i|)")
UNITS = {"": 1.0, "m": 1e-3, "k": 1e3}
UNITS |= {unit: 1000.0 ** (power + 2) for power, unit in enumerate("MGTPE")}
UNITS |= {f"{unit}i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")}


class Kubectl(Protocol):
    """Access to one namespace of a cluster."""

    def get(self, *words: str) -> Object:
        """Return the JSON answer of `kubectl get`. Raises NotFound, Unavailable."""

    def delete_pods(self, names: Sequence[str], seconds: float) -> None:
        """Delete pods and wait until they are gone. Raises Unavailable, DeadlineExceeded."""

    def run_in(self, pod: str, container: str, words: Sequence[str]) -> str:
        """Run a command in a container, and return its output, also if it fails. Raises Unavailable."""


@dataclass(frozen=True, kw_only=True)
class KubectlProgram:
    """`Kubectl` by the program of that name, with the user's own access.

    If `namespace` or `context` is empty, kubectl's current one is used.
    """

    namespace: str = ""
    context: str = ""

    def get(self, *words: str) -> Object:
        found: Object = json.loads(self._call("get", *words, "--output=json"))
        return found

    def delete_pods(self, names: Sequence[str], seconds: float) -> None:
        try:
            self._call("delete", "pod", *names, "--wait=true", f"--timeout={seconds:.0f}s", seconds=seconds)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"pods {', '.join(names)} are not gone after {seconds:.0f} s") from None

    def run_in(self, pod: str, container: str, words: Sequence[str]) -> str:
        return self._call("exec", pod, f"--container={container}", "--", *words, may_fail=True)

    def _call(self, *words: str, seconds: float = 0.0, may_fail: bool = False) -> str:
        place = [
            f"--{name}={value}" for name, value in (("namespace", self.namespace), ("context", self.context)) if value
        ]
        try:
            done = subprocess.run(
                ["kubectl", *place, *words], capture_output=True, text=True, timeout=seconds + CALL_SECONDS, check=False
            )
        except FileNotFoundError:
            raise ConfigError("--kubernetes: kubectl is not installed here, or not on PATH") from None
        except subprocess.TimeoutExpired:
            if seconds:
                raise
            raise Unavailable(f"kubectl {words[0]} has not answered for {CALL_SECONDS:.0f} s") from None
        if done.returncode and not (may_fail and done.stdout):
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            kind = NotFound if "(NotFound)" in reason else Unavailable
            raise kind(f"kubectl {words[0]}: {reason}")
        return done.stdout


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Pods of one replica of a worker group, or the head's pod; they are deleted together.

    `why` names what differs from the group's template, or is empty.
    """

    group: str
    index: str
    pods: tuple[str, ...]
    why: str
    grace: float
    is_other_release: bool = False

    @property
    def name(self) -> str:
        return self.group if self.group == HEAD_GROUP else f"{self.group} {self.index}"


@dataclass(frozen=True, kw_only=True)
class Release:
    """A RayCluster of the chart and its pods, as they are now."""

    name: str
    head: str
    head_container: str
    has_journal: bool
    keeps_ranks: bool
    """Whether the rings' processes outlive the head."""
    replicas: tuple[Replica, ...]
    wanted: Mapping[str, int]
    """Pods of each group that are to run."""
    running: Mapping[str, int]
    """Pods of each group that run and are not about to end."""
    num_rings: int


def read_release(kubectl: Kubectl, name: str) -> Release:
    """Return a release's state. Raises NotFound, Unavailable; ConfigError for a RayCluster that is not the chart's."""
    spec = kubectl.get("raycluster", name)["spec"]
    pods = kubectl.get("pods", "--selector", f"ray.io/cluster={name}")["items"]
    templates = {HEAD_GROUP: spec["headGroupSpec"]["template"]}
    wanted = {HEAD_GROUP: 1}
    for group in spec.get("workerGroupSpecs", ()):
        templates[group["groupName"]] = group["template"]
        wanted[group["groupName"]] = int(group.get("replicas", 0)) * int(group.get("numOfHosts", 1))
    head = templates[HEAD_GROUP]["spec"]["containers"][0]
    if head.get("command", [""])[-2:-1] != [CONFIG]:
        raise ConfigError(f"--kubernetes: RayCluster {name} is not one of ringserve's chart")
    together: dict[tuple[str, str], list[Object]] = {}
    running = dict.fromkeys(templates, 0)
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        group = HEAD_GROUP if labels.get("ray.io/node-type") == "head" else labels.get("ray.io/group", "")
        if group not in templates or "deletionTimestamp" in pod["metadata"]:
            continue
        if pod.get("status", {}).get("phase") == "Running":
            running[group] += 1
        index = "0" if group == HEAD_GROUP else labels.get(INDEX)
        if index is None:
            raise Unavailable(f"pod {pod['metadata']['name']} has no label {INDEX}: KubeRay is too old; update it")
        together.setdefault((group, index), []).append(pod)
    order = {group: place for place, group in enumerate(templates)}
    found = [
        _replica(group, index, members, templates[group])
        for (group, index), members in sorted(together.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]
    heads = [replica.pods[0] for replica in found if replica.group == HEAD_GROUP]
    if not heads:
        raise Unavailable(f"RayCluster {name} has no head pod: rings are lost until KubeRay has made another")
    volumes = {volume["name"] for volume in templates[HEAD_GROUP]["spec"].get("volumes", ())}
    return Release(
        name=name,
        head=heads[0],
        head_container=head["name"],
        has_journal=JOURNAL in volumes,
        keeps_ranks="gcsFaultToleranceOptions" in spec or any(each["name"] == STORAGE for each in head.get("env", ())),
        replicas=tuple(found),
        wanted=wanted,
        running=running,
        num_rings=sum(int(group.get("replicas", 0)) for group in spec.get("workerGroupSpecs", ())),
    )


def _replica(group: str, index: str, pods: Sequence[Object], template: Object) -> Replica:
    reasons = [difference(template, pod) for pod in pods]
    versions = {pod["metadata"].get("labels", {}).get(VERSION) for pod in pods}
    return Replica(
        group=group,
        index=index,
        pods=tuple(pod["metadata"]["name"] for pod in pods),
        why=next(filter(None, reasons), ""),
        grace=max(float(pod["spec"].get("terminationGracePeriodSeconds", 30)) for pod in pods),
        is_other_release=versions != {template["metadata"].get("labels", {}).get(VERSION)},
    )


def difference(template: Object, pod: Object) -> str:
    """Return the first thing that a template asks for and a pod lacks, e.g. "image"; empty if there is none.

    A pod has more than its template: defaults, and what KubeRay and Kubernetes add.
    """
    for kind in ("labels", "annotations"):
        has = pod["metadata"].get(kind) or {}
        for key, value in (template["metadata"].get(kind) or {}).items():
            if has.get(key) != value:
                return str(key)
    for field, value in template["spec"].items():
        if field != "containers" and not _contains(pod["spec"].get(field), value):
            is_config = field == "volumes" and _lacks(pod, template, CONFIG_VOLUME)
            return "configuration" if is_config else str(field)
    by_name = {container["name"]: container for container in pod["spec"]["containers"]}
    for container in template["spec"]["containers"]:
        has = by_name.get(container["name"], {})
        for field, value in container.items():
            if field not in NOT_COMPARED and not _contains(has.get(field), value):
                return str(field)
    return ""


def _lacks(pod: Object, template: Object, volume: str) -> bool:
    """Return whether a pod lacks the template's volume of that name."""
    asked = [each for each in template["spec"]["volumes"] if each["name"] == volume]
    return not _contains(pod["spec"].get("volumes"), asked)


def _contains(has: Any, asked: Any) -> bool:
    """Return whether `has` has everything in `asked`. Named items of lists are found by their names."""
    if isinstance(asked, Mapping):
        return isinstance(has, Mapping) and all(_contains(has.get(key), value) for key, value in asked.items())
    if isinstance(asked, list):
        if not isinstance(has, list):
            return not asked and has is None
        return all(any(_contains(other, item) for other in has) for item in asked)
    if asked is None or asked == "" or asked is False:
        return not has  # Kubernetes leaves out empty values
    return str(has) == str(asked) or (_quantity(has) is not None and _quantity(has) == _quantity(asked))


def _quantity(value: Any) -> float | None:
    """Return an amount as a number: Kubernetes writes 1000m as 1 and 1024Mi as 1Gi. None for any other text."""
    found = QUANTITY.fullmatch(str(value))
    return float(found[1]) * UNITS[found[2]] if found else None


@dataclass(kw_only=True)
class Rollout:
    """The restart of one release. `progress` gets one line for each step, `clock` returns seconds, `sleep` waits.

    `everything` replaces pods that have their template already. `forget` permits replacing a head without a journal:
    all conversations are then forgotten.
    """

    kubectl: Kubectl
    name: str
    start_seconds: float
    progress: Callable[[str], None]
    everything: bool = False
    forget: bool = False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self) -> list[str]:
        """Replace pods that differ, and return the names of the replaced ones.

        Raises NotFound, Unavailable, DeadlineExceeded; ConfigError before anything is deleted.
        """
        release = read_release(self.kubectl, self.name)
        chosen = [replica for replica in release.replicas if replica.why or self.everything]
        if not chosen:
            self.progress(f"every pod of {self.name} has its template's configuration and image")
            return []
        heads = [replica for replica in chosen if replica.group == HEAD_GROUP]
        if heads and not release.has_journal and not self.forget:
            raise ConfigError(
                f"--kubernetes: the head of {self.name} is to be replaced, and has no head.journalVolume: its "
                f"conversations would be forgotten; give --forget to do it all the same"
            )
        if any(each.is_other_release for each in chosen) or (heads and not release.keeps_ranks):
            self._replace_together(release)
            return [replica.name for replica in release.replicas]
        serving = self._serving(release)
        order = [*(replica for replica in chosen if replica not in heads), *heads]
        for replica in order:
            why = f": {replica.why} differs" if replica.why else ""
            self.progress(f"{replica.name} drains and is replaced{why}")
            self.kubectl.delete_pods(replica.pods, replica.grace + GRACE_SECONDS)
            self._await([replica.group], _count_of(release) if replica in heads else _all_of(serving))
        return [replica.name for replica in order]

    def _replace_together(self, release: Release) -> None:
        """Replace all pods: a head's end stops all rings, and another release's pods serve only among themselves."""
        if any(replica.is_other_release for replica in release.replicas):
            why = "the release differs"
        else:
            differs = next(replica.why for replica in release.replicas if replica.group == HEAD_GROUP)
            why = f"the head's {differs} differs" if differs else "the head is replaced"
        self.progress(f"all pods are replaced together, because {why}; running turns end first, and no other begins")
        pods = [pod for replica in release.replicas for pod in replica.pods]
        self.kubectl.delete_pods(pods, max(replica.grace for replica in release.replicas) + GRACE_SECONDS)
        self._await([*release.wanted], _count_of(release))

    def _await(self, groups: Sequence[str], lacks: Callable[[set[str]], str]) -> None:
        """Wait until groups have all pods and `lacks(serving rings)` is empty. Raises DeadlineExceeded."""
        deadline = self.clock() + self.start_seconds
        told = ""
        while lacking := self._lacking(groups, lacks):
            if lacking != told:
                self.progress(lacking)
            told = lacking
            if self.clock() > deadline:
                raise DeadlineExceeded(f"after {self.start_seconds:.0f} s: {lacking}; nothing else was replaced")
            self.sleep(POLL_SECONDS)

    def _lacking(self, groups: Sequence[str], lacks: Callable[[set[str]], str]) -> str:
        """Say in a sentence which parts of a release are missing; empty if none is."""
        try:
            release = read_release(self.kubectl, self.name)
        except Unavailable as error:
            return str(error)
        for group in groups:
            if (number := release.running[group]) < release.wanted[group]:
                return f"{number} of {release.wanted[group]} pods of {group} run"
        return lacks(self._serving(release))

    def _serving(self, release: Release) -> set[str]:
        """Return the names of the rings that serve, as the router in the head says; none while it cannot be asked."""
        words = ["ringserve", "status", "--json", "--router", f"{self.name}-router:{ROUTER_PORT}", "--config", CONFIG]
        try:
            told = self.kubectl.run_in(release.head, release.head_container, words)
            rings = json.loads(told)["rings"]
        except (Unavailable, NotFound, ValueError, KeyError):
            return set()
        return {ring["name"] for ring in rings if ring["state"] == "ready" and not ring["draining"]}


def _all_of(rings: set[str]) -> Callable[[set[str]], str]:
    """Return a function that says which of some rings do not serve."""

    def lacking(serving: set[str]) -> str:
        missing = sorted(rings - serving)
        return f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not serve yet" if missing else ""

    return lacking


def _count_of(release: Release) -> Callable[[set[str]], str]:
    """Return a function that says how many rings serve, if too few: another head may have other rings."""

    def lacking(serving: set[str]) -> str:
        return f"{len(serving)} of {release.num_rings} rings serve" if len(serving) < release.num_rings else ""

    return lacking
