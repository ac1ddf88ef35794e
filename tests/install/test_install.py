"""What `make install-test` plays, without a container: pods of the rendered chart, pip's sources, the OCI runtime."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.charts import REQUIRED, merged, render
from tests.install.images import paths_in
from tests.install.pods import Pod, Site, pods_of
from tests.install.run import EVERYTHING
from tests.install.runtime import relax_file


@pytest.fixture
def site(tmp_path: Path) -> Site:
    mounted = {name: tmp_path / name for name in ("inside", "gateway-tls", "tenants")}
    return Site(network="10.0.0", folder=tmp_path, secrets=mounted, ray_token="t" * 64)


def container(pod: Pod) -> dict[str, Any]:
    (found,) = pod.document["spec"]["containers"]
    return dict(found)


def test_the_defaults_are_seven_pods_with_addresses_and_folders_of_their_own(site: Site) -> None:
    pods = pods_of(render(REQUIRED), site)
    names = ["head", "prefill-0-0", "prefill-0-1", "decode-0-0", "decode-0-1", "gateway-0", "gateway-1"]
    assert [pod.name for pod in pods] == names
    assert [pod.address for pod in pods] == [f"10.0.0.{number}" for number in range(10, 17)]
    folders = [each["hostPath"]["path"] for pod in pods for each in pod.document["spec"]["volumes"]]
    assert len({*folders}) == len(folders) == 8, "a volume for /tmp in each pod, and the head's configuration"
    assert all(Path(folder).stat().st_mode & 0o777 == 0o777 for folder in folders), "the image's user writes to them"
    for pod in pods:
        assert "ports" not in container(pod), "podman would take them on this machine's own addresses"
        assert container(pod)["securityContext"]["runAsUser"] == 10001
        assert yaml.safe_load(pod.write(site.folder).read_text()) == pod.document
    assert (site.folder / "pods" / "head" / "config" / "head.sh").is_file()
    assert pods[0].ports.keys() >= {"router", "m-router", "m-prefill-0", "m-decode-0"}


def test_workers_join_the_head_with_the_resource_of_their_pool_as_their_shell_reads_it(site: Site) -> None:
    head, *others = pods_of(render(REQUIRED), site)
    for pod in others[:4]:
        *_, command = container(pod)["command"]
        words = shlex.split(command.partition("exec ")[2])
        assert words[:3] == ["ray", "start", f"--address={head.address}:6379"]
        (resource,) = (word.partition("=")[2] for word in words if word.startswith("--resources="))
        assert json.loads(resource) == {f"ringserve-{pod.component}": 1}
        env = {each["name"]: each["value"] for each in container(pod)["env"]}
        assert env["RAY_AUTH_TOKEN"] == site.ray_token
        assert env["POD_IP"] == pod.address
        assert pod.before_end[-1].startswith(f'exec ringserve drain --node "{pod.address}" --seconds 600')
    assert "--num-cpus=0" in str(container(head)["env"])


def test_a_release_with_everything_mounts_its_secrets_and_one_claim(site: Site) -> None:
    pods = {pod.name: pod for pod in pods_of(render(merged(REQUIRED, EVERYTHING)), site)}
    assert [name for name in pods if name.startswith("decode")] == ["decode-0-0", "decode-1-0"]

    def mounted(name: str) -> dict[str, str]:
        return {each["name"]: each["hostPath"]["path"] for each in pods[name].document["spec"]["volumes"]}

    assert mounted("head")["journal"] == str(site.folder / "claims" / "journal")
    assert {mounted(name)["internal"] for name in pods} == {str(site.secrets["inside"])}
    assert mounted("gateway-0")["tokens"] == str(site.secrets["tenants"])


def test_the_image_is_built_with_the_indexes_and_folders_that_pip_has_on_this_machine(tmp_path: Path) -> None:
    wheels, index, constraints = tmp_path / "wheels", tmp_path / "local" / "simple", tmp_path / "pip" / "pins.txt"
    for folder in (wheels, index, constraints.parent):
        folder.mkdir(parents=True)
    constraints.touch()
    settings = (
        f"find-links = {wheels} {wheels}/torch\nextra-index-url = file://{index} https://pypi.example/simple\n"
        f"constraint = {constraints}\ncert = /etc/ssl/certs/ca-certificates.crt\nproxy = /not/there\n"
    )
    assert paths_in(settings) == [index.parent, constraints, wheels]


@pytest.mark.parametrize(
    ("words", "file", "nested"),
    [
        (["--log=x", "create", "--bundle", "{folder}", "id"], "config.json", True),
        (["run", "--bundle={folder}", "id"], "config.json", True),
        (["exec", "--process", "{folder}/process.json", "id"], "process.json", False),
    ],
)
def test_the_runtime_leaves_out_the_limits_that_this_machine_may_not_raise(
    tmp_path: Path, words: list[str], file: str, nested: bool
) -> None:
    process = {"args": ["true"], "rlimits": [{"type": "RLIMIT_NOFILE"}], "oomScoreAdj": -500}
    (tmp_path / file).write_text(json.dumps({"process": process, "root": "r"} if nested else process))
    relax_file([word.format(folder=tmp_path) for word in words])
    left = json.loads((tmp_path / file).read_text())
    assert left == ({"process": {"args": ["true"]}, "root": "r"} if nested else {"args": ["true"]})


def test_the_runtime_changes_nothing_of_other_commands(tmp_path: Path) -> None:
    relax_file(["--root", str(tmp_path), "state", "id"])
    assert not list(tmp_path.iterdir())
