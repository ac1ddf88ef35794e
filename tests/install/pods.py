"""Pods of a rendered chart as files for `podman kube play`: what KubeRay, Deployment and kubelet make of the templates.

podman has no Services, Secrets of a cluster, probes or operators. So names of Services become entries in /etc/hosts,
volumes become folders of this machine, and the container's command is what KubeRay would have written there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ringserve.services.cluster.kubernetes import INDEX
from tests.helm.charts import Object, only

GCS_PORT = 6379
PROBED = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "imagePullPolicy")
IN_CLUSTER = (
    "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "topologySpreadConstraints", "affinity",
    "nodeSelector", "tolerations", "imagePullSecrets",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod to play, with its ports by name. `before_end` is its preStop hook, empty if it has none.

    `template` is what it was made from, and `labels` are that template's and KubeRay's.
    """

    name: str
    component: str
    address: str
    ports: Mapping[str, int]
    labels: Mapping[str, str]
    template: Object
    document: Object
    before_end: tuple[str, ...]

    @property
    def container(self) -> str:
        return f"{self.name}-{self.document['spec']['containers'][0]['name']}"

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(self.document))
        return path


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where pods are played: their network, and folders of this machine for their volumes.

    Addresses are given from `network`.10 on, e.g. 10.89.77.10. `secrets` has a folder by the name of a Secret.
    """

    network: str
    folder: Path
    secrets: Mapping[str, Path]
    ray_token: str

    def address(self, number: int) -> str:
        return f"{self.network}.{10 + number}"


def pods_of(objects: Sequence[Object], site: Site) -> list[Pod]:
    """Return the pods of a release: the head, the pods of each ring, and the gateways, in this order."""
    cluster = only(objects, "RayCluster")["spec"]
    head = cluster["headGroupSpec"]
    node = {"ray.io/cluster": only(objects, "RayCluster")["metadata"]["name"]}
    head_labels = {**node, "ray.io/node-type": "head"}
    templates = [("head", head_labels, head["template"], _head_env(head["rayStartParams"]))]
    for group in cluster["workerGroupSpecs"]:
        start = _worker_command(group["rayStartParams"], site.address(0))
        for replica in range(group["replicas"]):
            for host in range(group["numOfHosts"]):
                name = f"{group['groupName']}-{replica}-{host}"
                labels = {**node, "ray.io/group": group["groupName"], INDEX: str(replica)}
                templates.append((name, labels, group["template"], {"args": start}))
    gateway = only(objects, "Deployment", "-gateway")["spec"]
    gateways = range(gateway.get("replicas", 1))
    templates += [(f"gateway-{number}", {}, gateway["template"], {}) for number in gateways]
    names = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    return [
        _played(name, labels, template, extra, site, number, names)
        for number, (name, labels, template, extra) in enumerate(templates)
    ]


def _head_env(params: Mapping[str, str]) -> Object:
    """Return what KubeRay adds to the head: it only tells the command of `ray start`, which the chart runs itself."""
    words = ["ray start --head --block --dashboard-host=0.0.0.0", *_options(params)]
    return {"env": {"KUBERAY_GEN_RAY_START_CMD": " ".join(words)}}


def _worker_command(params: Mapping[str, str], head: str) -> list[str]:
    """Return KubeRay's command of a worker, which waits for the head as KubeRay's own initial container does."""
    start = " ".join([f"ray start --address={head}:{GCS_PORT} --block", *_options(params)])
    wait = f"until ray health-check --address {head}:{GCS_PORT} >/dev/null 2>&1; do sleep 1; done"
    return ["/bin/bash", "-c", f"{wait}; exec {start}"]


def _options(params: Mapping[str, str]) -> list[str]:
    """Return options as KubeRay writes them: unquoted, for a shell."""
    return [f"--{name}={value}" for name, value in params.items()]


def _played(
    name: str,
    labels: Mapping[str, str],
    template: Object,
    extra: Mapping[str, Any],
    site: Site,
    number: int,
    configs: Mapping[str, Mapping[str, str]],
) -> Pod:
    spec = copy.deepcopy(template["spec"])
    labels = {**template["metadata"]["labels"], **labels}
    component = labels["app.kubernetes.io/component"]
    (container,) = spec["containers"]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    # podman would publish a container's ports at this machine's own.
    ports = {each["name"]: each["containerPort"] for each in container.pop("ports", [])}
    for key in PROBED:
        container.pop(key, None)
    spec = {key: value for key, value in spec.items() if key not in IN_CLUSTER}
    address = site.address(number)
    if component in ("prefill", "decode"):
        container["command"] = extra["args"]
    # KubeRay gives Ray's pods the token; the field of the pod's own address is known here already.
    given = {"POD_IP": address, **extra.get("env", {})}
    if component != "gateway":
        given |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": site.ray_token}
    own = [each for each in container["env"] if each["name"] not in given]
    container["env"] = own + [{"name": key, "value": value} for key, value in given.items()]
    # A pod's settings hold for its container, which podman reads alone.
    pod_context = spec.get("securityContext", {})
    container["securityContext"] |= {key: pod_context[key] for key in ("runAsUser", "runAsGroup") if key in pod_context}
    spec["volumes"] = [_folder_volume(each, name, site, configs) for each in spec["volumes"]]
    spec["hostAliases"] = [{"ip": site.address(0), "hostnames": ["test-ringserve-router"]}]
    spec["restartPolicy"] = "Always" if component == "head" else "OnFailure"
    metadata = {"name": name, "labels": labels}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    before_end = tuple(word.replace("$POD_IP", address) for word in hook)
    return Pod(
        name=name,
        component=component,
        address=address,
        ports=ports,
        labels=labels,
        template=template,
        document=document,
        before_end=before_end,
    )


def _folder_volume(volume: Object, pod: str, site: Site, configs: Mapping[str, Mapping[str, str]]) -> Object:
    """Return a volume as a folder of this machine: one for each pod, but Secrets and claims are shared."""
    name = volume["name"]
    if "secret" in volume:
        folder = site.secrets[volume["secret"]["secretName"]]
    elif "persistentVolumeClaim" in volume:
        folder = _writable(site.folder / "claims" / volume["persistentVolumeClaim"]["claimName"])
    elif "configMap" in volume:
        folder = _writable(site.folder / "pods" / pod / name)
        for key, text in configs[volume["configMap"]["name"]].items():
            (folder / key).write_text(text)
    else:
        folder = _writable(site.folder / "pods" / pod / name)
    return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}


def _writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    return folder
