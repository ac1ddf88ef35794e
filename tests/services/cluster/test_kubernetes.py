"""Rolling restart on Kubernetes: pods as KubeRay makes them from the rendered chart, and a kubectl that plays it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.errors import ConfigError, DeadlineExceeded, NotFound, Unavailable
from ringserve.services.cluster.kubernetes import CONFIG, INDEX, KubectlProgram, Rollout, difference, read_release
from tests.helm.charts import AUTOSCALED, CUDA, Object, merged, only, render

NAME = "test-ringserve"
TWO_AND_TWO: Object = {"prefill": {"replicas": 2}, "decode": {"replicas": 2, "parallelism": {"cp": 1}}}
JOURNAL: Object = {"head": {"journalVolume": {"persistentVolumeClaim": {"claimName": "journal"}}}}


class FakeKubernetes:
    """A RayCluster and its pods. A deleted pod comes back from the newest template at the second look after.

    `lost` are pods' groups that never come back. Rings are named as their replicas; they serve while their pods run.
    """

    def __init__(self, *values: Object) -> None:
        self.cluster = only(render(TWO_AND_TWO, *values), "RayCluster")
        self.deleted: list[tuple[str, ...]] = []
        self.lost: set[str] = set()
        self.unready: set[str] = set()
        self.num_serving: list[int] = []
        self._made = 0
        self._looks = 0
        self._coming: list[tuple[int, str, str, int]] = []
        self.pods: dict[str, Object] = {}
        self._make("head", "0", 0)
        for group in self.cluster["spec"]["workerGroupSpecs"]:
            for replica in range(group["replicas"]):
                for host in range(group["numOfHosts"]):
                    self._make(group["groupName"], str(replica), host)

    def upgrade(self, *values: Object) -> None:
        self.cluster = only(render(TWO_AND_TWO, *values), "RayCluster")

    def template(self, group: str) -> Object:
        spec = self.cluster["spec"]
        groups = {each["groupName"]: each for each in spec["workerGroupSpecs"]}
        found: Object = (spec["headGroupSpec"] if group == "head" else groups[group])["template"]
        return found

    def _make(self, group: str, index: str, host: int) -> None:
        """Make a pod as KubeRay and Kubernetes do, with what they add."""
        template = copy.deepcopy(self.template(group))
        self._made += 1
        name = f"{NAME}-{group}-{index}-{host}-{self._made}"
        labels = {"ray.io/node-type": "head" if group == "head" else "worker", "ray.io/group": group}
        if group != "head":
            labels[INDEX] = index
        spec = template["spec"]
        spec["containers"][0]["command"] = ["/bin/bash", "-c", "--"]
        spec["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
        spec["containers"][0]["env"].append({"name": "RAY_ADDRESS", "value": "head:6379"})
        spec["volumes"].append({"name": "shared-mem", "emptyDir": {"medium": "Memory"}})
        spec["schedulerName"] = "default-scheduler"
        if not spec.pop("enableServiceLinks"):
            spec["enableServiceLinks"] = False
        self.pods[name] = {
            "metadata": {**template["metadata"], "name": name, "labels": {**template["metadata"]["labels"], **labels}},
            "spec": spec,
            "status": {"phase": "Running"},
        }

    def get(self, *words: str) -> Object:
        if words[0] == "raycluster":
            if words[1] != NAME:
                raise NotFound(f'kubectl get: Error from server (NotFound): rayclusters.ray.io "{words[1]}" not found')
            return self.cluster
        assert words == ("pods", "--selector", f"ray.io/cluster={NAME}")
        self._looks += 1
        for each in [each for each in self._coming if each[0] <= self._looks]:
            self._coming.remove(each)
            self._make(*each[1:])
        return {"items": list(self.pods.values())}

    def delete_pods(self, names: Sequence[str], seconds: float) -> None:
        assert seconds == 660.0 + 60.0
        self.deleted.append(tuple(names))
        for name in names:
            labels = self.pods.pop(name)["metadata"]["labels"]
            group, host = labels["ray.io/group"], int(name.split("-")[-2])
            if group not in self.lost:
                self._coming.append((self._looks + 2, group, labels.get(INDEX, "0"), host))

    def rings(self) -> list[Object]:
        """Return a ring for each replica, which serves while all its pods run."""
        found: list[Object] = []
        for group in self.cluster["spec"]["workerGroupSpecs"]:
            for replica in range(group["replicas"]):
                name = f"{group['groupName']}-{replica}"
                there = sum(f"{NAME}-{name}-" in pod for pod in self.pods)
                state = "ready" if there == group["numOfHosts"] and name not in self.unready else "lost"
                found.append({"name": name, "state": state, "draining": False})
        return found

    def run_in(self, pod: str, container: str, words: Sequence[str]) -> str:
        assert pod in self.pods
        assert container == "ray-head"
        assert list(words[:3]) == ["ringserve", "status", "--json"]
        assert words[words.index("--config") + 1] == CONFIG
        rings = self.rings()
        self.num_serving.append(sum(ring["state"] == "ready" for ring in rings))
        return json.dumps({"rings": rings})


class Clock:
    """Time that passes while somebody sleeps."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def rollout(kubernetes: FakeKubernetes, **settings: Any) -> tuple[Rollout, list[str]]:
    told: list[str] = []
    clock = Clock()
    made = Rollout(
        kubectl=kubernetes, name=NAME, start_seconds=30.0, progress=told.append,
        clock=lambda: clock.now, sleep=clock.sleep, **settings,
    )  # fmt: skip
    return made, told


def groups_of(deleted: Sequence[tuple[str, ...]]) -> list[list[str]]:
    return [["-".join(name.removeprefix(f"{NAME}-").split("-")[:-1]) for name in names] for names in deleted]


def test_pods_with_the_newest_template_stay() -> None:
    kubernetes = FakeKubernetes()
    made, told = rollout(kubernetes)
    assert made.run() == []
    assert told == [f"every pod of {NAME} has its template's configuration and image"]
    assert not kubernetes.deleted


def test_rings_of_a_changed_pool_are_replaced_one_after_the_other_as_whole_replicas() -> None:
    kubernetes = FakeKubernetes()
    env = [{"name": "NCCL_DEBUG", "value": "WARN"}]
    kubernetes.upgrade({"prefill": {"env": env}})
    made, told = rollout(kubernetes)
    assert made.run() == ["prefill 0", "prefill 1"]
    assert groups_of(kubernetes.deleted) == [["prefill-0-0", "prefill-0-1"], ["prefill-1-0", "prefill-1-1"]]
    assert told[0] == "prefill 0 drains and is replaced: env differs"
    assert "0 of 4 pods of prefill run" not in told
    assert min(kubernetes.num_serving) >= 3, "one ring at a time is away"
    assert not any(replica.why for replica in read_release(kubernetes, NAME).replicas)


def test_all_of_a_release_are_replaced_in_the_order_of_their_rings_if_that_is_asked_for() -> None:
    kubernetes = FakeKubernetes(JOURNAL)
    made, told = rollout(kubernetes, everything=True)
    made.run()
    assert told[0].startswith("all pods are replaced together, because the head is replaced;")
    (together,) = groups_of(kubernetes.deleted)
    assert together[0] == "head-0-0"
    assert len(together) == 1 + 2 * 2 + 2, "the head's end stops all rings"


def test_a_head_without_a_journal_is_replaced_only_by_who_says_so() -> None:
    kubernetes = FakeKubernetes()
    kubernetes.upgrade({"config": {"router": {"max_conversations": 7}}})
    made, _ = rollout(kubernetes)
    with pytest.raises(ConfigError, match="its conversations would be forgotten; give --forget"):
        made.run()
    assert not kubernetes.deleted
    made, told = rollout(kubernetes, forget=True)
    assert made.run() == ["head", "prefill 0", "prefill 1", "decode 0", "decode 1"]
    assert len(kubernetes.deleted) == 1
    assert told[0].startswith("all pods are replaced together, because the head's configuration")
    assert told[1:] == [f"RayCluster {NAME} has no head pod: rings are lost until KubeRay has made another"]


KEPT: Object = merged(JOURNAL, {"ray": {"gcsStorage": "volume"}})


def test_a_head_whose_ranks_outlive_it_is_replaced_alone_and_last() -> None:
    kubernetes = FakeKubernetes(KEPT)
    kubernetes.upgrade(KEPT, {"config": {"router": {"max_conversations": 7}}})
    made, told = rollout(kubernetes)
    assert made.run() == ["head"]
    assert told[0] == "head drains and is replaced: configuration differs"
    kubernetes.upgrade(KEPT, {"image": {"tag": "new"}})
    made, _ = rollout(kubernetes)
    assert made.run() == ["prefill 0", "prefill 1", "decode 0", "decode 1", "head"]
    assert len(kubernetes.deleted) == 6


def test_fewer_rings_are_not_waited_for_after_the_head_has_gone() -> None:
    kubernetes = FakeKubernetes(KEPT)
    kubernetes.upgrade(KEPT, {"decode": {"replicas": 1}})
    kubernetes.pods = {name: pod for name, pod in kubernetes.pods.items() if "-decode-1-" not in name}
    made, _ = rollout(kubernetes)
    assert made.run() == ["head"]


def test_another_release_replaces_all_pods_together() -> None:
    kubernetes = FakeKubernetes(JOURNAL)
    for template in ("head", "prefill", "decode"):
        kubernetes.template(template)["metadata"]["labels"]["app.kubernetes.io/version"] = "9.9.9"
    made, told = rollout(kubernetes)
    assert len(made.run()) == 5
    assert told[0].startswith("all pods are replaced together, because the release differs;")
    assert len(kubernetes.deleted) == 1


@pytest.mark.parametrize("stays_away", ["pods", "ring"])
def test_a_ring_that_does_not_come_back_stops_the_restart(stays_away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kubernetes = FakeKubernetes()
    kubernetes.upgrade({"decode": {"env": [{"name": "A", "value": "B"}]}})
    made, told = rollout(kubernetes)
    if stays_away == "pods":
        kubernetes.lost = {"decode"}
        lacking = "1 of 2 pods of decode run"
    else:
        monkeypatch.setattr(kubernetes, "delete_pods", _then_unready(kubernetes, "decode-0"))
        lacking = "decode-0 does not serve yet"
    with pytest.raises(DeadlineExceeded, match=f"after 30 s: {lacking}; nothing else was replaced"):
        made.run()
    assert groups_of(kubernetes.deleted) == [["decode-0-0"]]
    assert told[-1] == lacking


def _then_unready(kubernetes: FakeKubernetes, ring: str) -> Any:
    original = kubernetes.delete_pods

    def delete(names: Sequence[str], seconds: float) -> None:
        original(names, seconds)
        kubernetes.unready.add(ring)

    return delete


def test_a_ring_that_was_away_before_is_not_waited_for() -> None:
    kubernetes = FakeKubernetes()
    kubernetes.unready = {"prefill-1"}
    kubernetes.upgrade({"decode": {"env": [{"name": "A", "value": "B"}]}})
    made, _ = rollout(kubernetes)
    assert made.run() == ["decode 0", "decode 1"]


def test_what_is_no_release_of_the_chart_is_refused() -> None:
    kubernetes = FakeKubernetes()
    with pytest.raises(NotFound, match=r'rayclusters\.ray\.io "other" not found'):
        read_release(kubernetes, "other")
    kubernetes.cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["command"] = ["ray", "start"]
    with pytest.raises(ConfigError, match=f"RayCluster {NAME} is not one of ringserve's chart"):
        read_release(kubernetes, NAME)


def test_a_release_without_its_head_says_what_is_missing() -> None:
    kubernetes = FakeKubernetes()
    kubernetes.pods = {name: pod for name, pod in kubernetes.pods.items() if "-head-" not in name}
    with pytest.raises(Unavailable, match="has no head pod"):
        read_release(kubernetes, NAME)


@pytest.mark.parametrize("values", [{}, CUDA, AUTOSCALED, JOURNAL])
def test_a_pod_of_its_own_template_differs_in_nothing(values: Object) -> None:
    kubernetes = FakeKubernetes(merged(values))
    assert not any(replica.why for replica in read_release(kubernetes, NAME).replicas)


@pytest.mark.parametrize(
    ("asked", "has", "told"),
    [
        ({"cpu": "1000m", "memory": "1024Mi"}, {"cpu": "1", "memory": "1Gi"}, ""),
        ({"cpu": 2, "memory": "4Gi"}, {"cpu": "2", "memory": "4096Mi"}, ""),
        ({"memory": "4Gi"}, {"memory": "4G"}, "resources"),
        ({"cpu": "2"}, {}, "resources"),
    ],
)
def test_amounts_are_compared_as_amounts(asked: Object, has: Object, told: str) -> None:
    template = {"metadata": {}, "spec": {"containers": [{"name": "c", "resources": {"limits": asked}}]}}
    pod = {"metadata": {}, "spec": {"containers": [{"name": "c", "resources": {"limits": has}}]}}
    assert difference(template, pod) == told


KUBECTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *raycluster*) echo '{{"spec": {{}}}}' ;;
  *delete*) echo 'error: timed out waiting for the condition on pods/a' >&2; exit 1 ;;
  *exec*) echo '{{"rings": []}}'; exit 3 ;;
  *) echo 'Warning: old' >&2; echo 'Error from server (NotFound): pods "x" not found' >&2; exit 1 ;;
esac
"""


def test_kubectl_is_called_as_the_user_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, program = tmp_path / "log", tmp_path / "kubectl"
    program.write_text(KUBECTL.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    kubectl = KubectlProgram(namespace="serving", context="c1")
    assert kubectl.get("raycluster", NAME) == {"spec": {}}
    assert kubectl.run_in("head", "ray-head", ["ringserve", "status"]) == '{"rings": []}\n', (
        "exit status 3 is an answer"
    )
    with pytest.raises(Unavailable, match="kubectl delete: error: timed out waiting"):
        kubectl.delete_pods(["a"], 5.0)
    with pytest.raises(NotFound, match=r'kubectl get: Error from server \(NotFound\): pods "x" not found'):
        kubectl.get("pods", "x")
    assert log.read_text().splitlines() == [
        "--namespace=serving --context=c1 get raycluster test-ringserve --output=json",
        "--namespace=serving --context=c1 exec head --container=ray-head -- ringserve status",
        "--namespace=serving --context=c1 delete pod a --wait=true --timeout=5s",
        "--namespace=serving --context=c1 get pods x --output=json",
    ]


def test_a_missing_kubectl_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--kubernetes: kubectl is not installed here"):
        KubectlProgram().get("pods")
