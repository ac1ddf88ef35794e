"""`make install-test`: build the image, play the chart's pods by podman, ask over each port, lose a pod in a stream.

Two releases are played, one after the other: the chart's defaults, and a release with TLS, tokens, a journal volume and
further objects. Needs Linux, root, namespaces, and Debian's packages and PyPI (or pip's sources of this machine). The
image's layers stay in build/install-test, so that a second run takes minutes less.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ringserve.client import Client, Sampling, TlsFiles
from ringserve.errors import RingserveError
from ringserve.services.auth.tenants import hash_token, new_token
from ringserve.services.cluster.kubernetes import Rollout
from tests.helm.charts import ALL_OPTIONS, REQUIRED, ROOT, SECURE, Object, merged, only, render
from tests.install.images import CONTROL_SECONDS, Engine, EngineError, Unable
from tests.install.pods import Pod, Site, pods_of
from tests.services.auth.certificates import Authority

IMAGE = f"{REQUIRED['image']['repository']}:0.1.0-cpu"
NETWORK = "10.89.77"
START_SECONDS = 300.0
RETURN_SECONDS = 180.0
ANSWER_SECONDS = 240.0
POLL_SECONDS = 1.0
LONG = 600
"""Tokens of the answer in whose middle a pod is lost."""
LOST_AT = 60
HOST = "gateway.example"
INSIDE = "ringserve.internal"
EVERYTHING: Object = merged(
    ALL_OPTIONS,
    SECURE,
    {
        "image": {"pullSecrets": []},
        "head": {"journalVolume": {"persistentVolumeClaim": {"claimName": "journal"}}},
        "decode": {"replicas": 2, "parallelism": {"cp": 1}},
        "ray": {"gcsStorage": "volume"},
        "logs": {"format": "json"},
    },
)
"""Two decode rings of one pod each: one of them drains and leaves by its own hook."""


class Failed(Exception):
    """A check did not hold; the text says which."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release to play, and how clients reach it."""

    name: str
    values: Object
    site: Site
    tls: TlsFiles | None = None
    token: str = ""

    def client(self, pod: Pod) -> Client:
        return Client(f"{pod.address}:50051", tls=self.tls, token=self.token)

    def ask_http(self, pod: Pod, prompt: str) -> str:
        """Return the text of an answer over OpenAI's HTTP."""
        body = json.dumps({"model": "builtin:tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token or 'none'}"}
        context = None
        if self.tls is not None:
            context = ssl.create_default_context(cafile=str(self.tls.ca))
            context.check_hostname = False  # called by its address; the certificate names its host
            context.load_cert_chain(str(self.tls.cert), str(self.tls.key))
        scheme = "https" if context else "http"
        url = f"{scheme}://{pod.address}:8000/v1/completions"
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=context) as answer:
            return str(json.load(answer)["choices"][0]["text"])


def defaults(folder: Path) -> Release:
    return Release(name="defaults", values=REQUIRED, site=_site(folder, {}))


def everything(folder: Path) -> Release:
    """Return a release with every option, and write its secrets as Kubernetes would mount them."""
    authority, other = Authority.make(folder / "authority"), Authority.make(folder / "clients")
    inside, gateway = authority.sign("inside", f"DNS:{INSIDE}"), authority.sign("gateway", f"DNS:{HOST}")
    client = other.sign("client")
    token = new_token()
    tenants = {"tenants": [{"name": "acme", "operator": True, "tokens": [{"sha256": hash_token(token)}]}]}
    files = {
        "inside": {"tls.crt": inside.cert, "tls.key": inside.key, "ca.crt": authority.own.cert},
        "gateway-tls": {"tls.crt": gateway.cert, "tls.key": gateway.key, "ca.crt": other.own.cert},
    }
    mounted = {}
    for name, sources in files.items():
        mounted[name] = folder / "secrets" / name
        mounted[name].mkdir(parents=True)
        for key, source in sources.items():
            (mounted[name] / key).write_bytes(source.read_bytes())
    mounted["tenants"] = folder / "secrets" / "tenants"
    mounted["tenants"].mkdir()
    (mounted["tenants"] / SECURE["gateway"]["tokens"]["key"]).write_text(json.dumps(tenants))
    tls = TlsFiles(ca=authority.own.cert, cert=client.cert, key=client.key, server_name=HOST)
    values = merged(REQUIRED, EVERYTHING)
    return Release(name="everything", values=values, site=_site(folder, mounted), tls=tls, token=token)


def _site(folder: Path, mounted: dict[str, Path]) -> Site:
    return Site(network=NETWORK, folder=folder, secrets=mounted, ray_token=secrets.token_hex(32))


@dataclass(kw_only=True)
class Played:
    """The pods of a release while they run."""

    engine: Engine
    release: Release
    network: str
    pods: Sequence[Pod]
    report: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    fault: str = "none"

    def start(self, pod: Pod) -> None:
        file = pod.write(self.release.site.folder)
        self.engine.podman("kube", "play", f"--network={self.network}", f"--ip={pod.address}", str(file))

    def delete(self, pod: Pod, *, told: bool) -> None:
        """Delete a pod: by its hook first if it is `told`, and at once otherwise, as if its node were lost."""
        if told and pod.before_end:
            self.engine.podman("exec", pod.container, *pod.before_end, seconds=RETURN_SECONDS)
        self.engine.podman("pod", "rm", "--force", f"--time={10 if told else 0}", pod.name)

    def pod_of(self, client: Client, ring: str) -> Pod:
        """Return a pod with ranks of a ring: Ray has placed them on any pods of the ring's pool."""
        (nodes,) = (each.nodes for each in client.server_info().rings if each.name == ring)
        return next(pod for pod in self.pods if pod.address in nodes)

    def replace(self, pod: Pod, *, told: bool) -> None:
        """Delete a pod and start it again, as the controller of its template would."""
        self.delete(pod, told=told)
        self.start(pod)

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == component]

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> float:
        """Wait for a condition -> the seconds that it took. Raises Failed."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds:
                raise Failed(f"{what}: not within {seconds:.0f} s; the gateway's last fault: {self.fault}")
            time.sleep(POLL_SECONDS)  # containers of another program: nothing tells when they serve
        return time.monotonic() - began

    def ready_rings(self) -> int:
        """Return how many rings serve, by a gateway's word; 0 while it has none, whose reason is kept."""
        try:
            with self.release.client(self.of("gateway")[0]) as client:
                return sum(ring.state == "ready" and not ring.draining for ring in client.server_info().rings)
        except RingserveError as error:
            self.fault = str(error)
            return 0

    def rank_pids(self) -> dict[str, tuple[int, ...]]:
        with self.release.client(self.of("gateway")[0]) as client:
            return {ring.name: ring.rank_pids for ring in client.server_info().rings}

    def num_rings(self) -> int:
        return sum(int(self.release.values.get(role, {}).get("replicas", 1)) for role in ("prefill", "decode"))

    def logs(self) -> None:
        """Print the end of each pod's log, for who reads why a check failed."""
        for pod in self.pods:
            done = subprocess.run(
                [*self.engine.command("podman"), "logs", "--tail=25", pod.container],
                capture_output=True, text=True, timeout=CONTROL_SECONDS, check=False,
            )  # fmt: skip
            print(f"--- {pod.name}\n{done.stdout}{done.stderr}", file=sys.stderr)


@contextmanager
def played(engine: Engine, release: Release, report: Callable[[str], None]) -> Iterator[Played]:
    """Play the pods of a release, and remove all of them at the end."""
    network = f"ringserve-install-{release.name}"
    engine.podman("network", "rm", "--force", network, check=False)
    engine.podman("network", "create", f"--subnet={NETWORK}.0/24", "--disable-dns", network)
    pods = pods_of(render(release.values), release.site)
    names = [pod.name for pod in pods]
    running = Played(engine=engine, release=release, network=network, pods=pods, report=report)
    try:
        for pod in pods:
            running.start(pod)
        yield running
    except BaseException:
        running.logs()
        raise
    finally:
        engine.podman("pod", "rm", "--force", "--time=0", *names, seconds=RETURN_SECONDS, check=False)
        engine.podman("network", "rm", "--force", network, check=False)


@dataclass(kw_only=True)
class PlayedKubernetes:
    """`Kubectl` over pods that are played: a deleted pod drains by its hook and comes back from the newest template.

    `objects` are the newest release's.
    """

    run: Played
    objects: Sequence[Object]

    def get(self, *words: str) -> Object:
        if words[0] == "raycluster":
            return only(self.objects, "RayCluster")
        running = self.run.engine.podman("pod", "ps", "--filter=status=running", "--format={{.Name}}").split()
        items = []
        for pod in self.run.pods:
            metadata = {**pod.template["metadata"], "name": pod.name, "labels": pod.labels}
            phase = "Running" if pod.name in running else "Pending"
            if pod.component != "gateway":
                items.append({"metadata": metadata, "spec": pod.template["spec"], "status": {"phase": phase}})
        return {"items": items}

    def delete_pods(self, names: Sequence[str], seconds: float) -> None:
        newest = {pod.name: pod for pod in pods_of(self.objects, self.run.release.site)}
        for pod in [pod for pod in self.run.pods if pod.name in names]:
            self.run.delete(pod, told=True)
            self.run.pods = [newest[each.name] if each.name == pod.name else each for each in self.run.pods]
            self.run.start(newest[pod.name])

    def run_in(self, pod: str, container: str, words: Sequence[str]) -> str:
        done = subprocess.run(
            [*self.run.engine.command("podman"), "exec", f"{pod}-{container}", *words],
            capture_output=True, text=True, timeout=CONTROL_SECONDS, check=False,
        )  # fmt: skip
        return done.stdout


def check(held: bool, what: str) -> None:
    """Raise Failed unless a check held."""
    if not held:
        raise Failed(what)


def check_pods(run: Played) -> None:
    """See that the processes of every pod run as the image's user, on a file system that they cannot write to."""
    for pod in run.pods:
        user = run.engine.podman("exec", pod.container, "id", "-u").strip()
        check(user == "10001", f"{pod.name} runs as user {user}")
        written = run.engine.podman("exec", pod.container, "sh", "-c", "touch /venv/x 2>/dev/null || echo no").strip()
        check(written == "no", f"{pod.name} can write to its image")


def check_ports(run: Played) -> None:
    """Each gateway answers by gRPC and by HTTP with the same text; every port of metrics has ringserve's."""
    texts = set()
    for gateway in run.of("gateway"):
        with run.release.client(gateway) as client:
            sampling = Sampling(max_tokens=16, temperature=0.0)
            texts.add(client.ask("Once upon a time", sampling=sampling, timeout=ANSWER_SECONDS).text)
        texts.add(run.release.ask_http(gateway, "Once upon a time"))
    check(len(texts) == 1, f"ports and gateways give different answers: {texts}")
    for pod in run.pods:
        for port in (port for name, port in pod.ports.items() if name.startswith("m")):
            with urllib.request.urlopen(f"http://{pod.address}:{port}/metrics", timeout=10) as page:
                check(b"ringserve_" in page.read(), f"{pod.name}:{port} shows no metrics")


def check_strangers(run: Played) -> None:
    """Without its certificate and token nobody is served, where the release asks for them."""
    gateway = run.of("gateway")[0]
    if run.release.tls is None:
        return
    with Client(f"{gateway.address}:50051", tls=run.release.tls) as client:
        try:
            client.ask("Once", sampling=Sampling(max_tokens=1), timeout=30)
        except RingserveError as error:
            run.report(f"without a token: {error}")
        else:
            raise Failed("a client without a token was served")


def check_lost_pod(run: Played, *, told: bool, is_head: bool = False) -> None:
    """Delete a pod under a stream, which goes on with the tokens that it has had without a loss.

    It is the head's, or one of the ring that decodes the stream.
    """
    sampling = Sampling(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    with run.release.client(run.of("gateway")[0]) as client:
        whole = client.ask("A pod is lost", sampling=sampling, timeout=ANSWER_SECONDS, no_cache=True)
        tokens: list[int] = []
        longest, latest = 0.0, time.monotonic()
        replaced: Future[None] | None = None
        with (
            ThreadPoolExecutor(1) as other,
            client.stream("A pod is lost", sampling=sampling, timeout=ANSWER_SECONDS, no_cache=True) as stream,
        ):
            for piece in stream:
                longest, latest = max(longest, time.monotonic() - latest), time.monotonic()
                tokens += piece.token_ids
                if replaced is None and len(tokens) >= LOST_AT and stream.plan is not None:
                    pod = run.of("head")[0] if is_head else run.pod_of(client, stream.plan.decode_ring)
                    replaced = other.submit(run.replace, pod, told=told)
            answer = stream.answer()
            if replaced is None:
                raise Failed(f"the stream ended after {len(tokens)} tokens, before a pod was lost")
            replaced.result(RETURN_SECONDS)
    check(len(answer.token_ids) == LONG, f"the stream ended after {len(answer.token_ids)} of {LONG} tokens")
    check(answer.token_ids == whole.token_ids, "the stream went on with other tokens")
    check(tuple(tokens) == whole.token_ids, "pieces and answer differ")
    back = run.until("the lost ring is back", lambda: run.ready_rings() == run.num_rings(), RETURN_SECONDS)
    how = "drained by its hook and deleted" if told else "lost without a word"
    run.report(
        f"{pod.name} {how} after {LOST_AT} tokens: all {LONG} came, the longest pause {longest:.1f} s; "
        f"every ring ready {back:.0f} s after the stream's end"
    )


def check_upgrade(run: Played) -> None:
    """Upgrade the decode pool's template: `ringserve restart --kubernetes` replaces ring after ring under streams."""
    changed = merged(run.release.values, {"decode": {"env": [{"name": "NCCL_DEBUG", "value": "WARN"}]}})
    rollout = Rollout(
        kubectl=PlayedKubernetes(run=run, objects=render(changed)),
        name="test-ringserve",
        start_seconds=START_SECONDS,
        progress=lambda line: run.report(f"  {line}"),
    )
    sampling = Sampling(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    answered, lost = 0, 0
    with ThreadPoolExecutor(1) as other, run.release.client(run.of("gateway")[0]) as client:
        whole = client.ask("An upgrade", sampling=sampling, timeout=ANSWER_SECONDS).token_ids
        restarted = other.submit(rollout.run)
        while not restarted.done():
            found = client.ask("An upgrade", sampling=sampling, timeout=ANSWER_SECONDS).token_ids
            answered += 1
            lost += found != whole
        replaced = restarted.result()
    check(replaced == ["decode 0", "decode 1"], f"replaced were {replaced}")
    check(lost == 0, f"{lost} of {answered} answers had other tokens during the upgrade")
    for pod in run.of("decode"):
        value = run.engine.podman("exec", pod.container, "printenv", "NCCL_DEBUG").strip()
        check(value == "WARN", f"{pod.name} has not the newest template")
    check(rollout.run() == [], "a second restart finds pods to replace")
    run.report(f"both decode rings upgraded, one after the other; {answered} answers meanwhile, all with their tokens")


def check_lost_head(run: Played) -> None:
    """Replace the head's pod: a conversation goes on, from the journal's volume."""
    (head,) = run.of("head")
    sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    pids = run.rank_pids()
    with run.release.client(run.of("gateway")[0]) as client:
        tale = client.talk("kept")
        tale.ask("Once upon a time", sampling=sampling, timeout=ANSWER_SECONDS)
        remembered = client.conversation("kept").num_tokens
    began = time.monotonic()
    run.replace(head, told=True)
    run.until("rings return to a new head", lambda: run.ready_rings() == run.num_rings(), START_SECONDS)
    with run.release.client(run.of("gateway")[0]) as client:
        found = client.conversation("kept").num_tokens
        check(found == remembered, f"the conversation has {found} tokens, and had {remembered}")
        answer = client.ask(
            " And then?", conversation_id="kept", mode="append", sampling=sampling, timeout=ANSWER_SECONDS
        )
        check(answer.usage.prompt_tokens > remembered, "the conversation has lost its first turn")
    seconds = time.monotonic() - began
    check(run.rank_pids() == pids, f"ranks were started anew: {run.rank_pids()}, and were {pids}")
    run.report(f"head replaced: all rings ready after {seconds:.0f} s with the same ranks, the conversation went on")


def play(engine: Engine, release: Release) -> None:
    """Play a release and hold it to every check. Raises Failed."""

    def report(line: str) -> None:
        print(f"{release.name}: {line}", flush=True)

    with played(engine, release, report) as run:
        run.until("all rings are ready", lambda: run.ready_rings() == run.num_rings(), START_SECONDS)
        report(f"{len(run.pods)} pods, all rings ready {time.monotonic() - run.began:.0f} s after the first pod")
        check_pods(run)
        check_ports(run)
        report("gRPC, HTTP and metrics answer on every port; user 10001, file systems read-only")
        check_strangers(run)
        check_lost_pod(run, told=False)
        if release.name == "everything":
            check_lost_pod(run, told=True)
            check_upgrade(run)
            check_lost_pod(run, told=False, is_head=True)
            check_lost_head(run)


RELEASES = {"defaults": defaults, "everything": everything}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RELEASES, action="append", help="releases to play (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "install-test", help="where images are kept")
    parser.add_argument("--no-build", action="store_true", help="play the image that was built before")
    options = parser.parse_args()
    engine = Engine(options.folder)
    began = time.monotonic()
    try:
        engine.prepare()
        engine.make_base()
        engine.try_one()
    except Unable as error:
        print(f"install-test cannot run here: {error}", file=sys.stderr)
        return 2
    if not options.no_build:
        engine.build(IMAGE)
        print(f"image built after {time.monotonic() - began:.0f} s", flush=True)
    for name in options.only or RELEASES:
        folder = Path(tempfile.mkdtemp(prefix="ringserve-install-"))
        try:
            play(engine, RELEASES[name](folder))
        except (Failed, EngineError, RingserveError, urllib.error.URLError) as error:
            print(f"{name}: FAILED: {error}")
            return 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"all releases held, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
