"""`ringserve up`, `serve` and `down`: a cluster on this machine or on a Ray cluster, until Ctrl-C, SIGTERM, `down`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
from rich.console import Console
from typer import Option

from ringserve.cp_core.errors import ConfigError, NotFound, Unavailable
from ringserve.services.auth.tls import SECRET_VARIABLE
from ringserve.services.cli.command import argument, command, flag, hidden, option
from ringserve.services.cli.import_model import prepare
from ringserve.services.cli.options import ClusterName, ConfigOptions, DrainSeconds, JsonFlag
from ringserve.services.cluster.state import (
    ClusterStage,
    ClusterState,
    RayDirectory,
    can_fork,
    claim_name,
    clear_abandoned,
    end_cluster,
    read_record,
    remove_state,
    require_free_name,
    require_state,
    started_after_boot,
    state_directory,
    write_state,
)
from ringserve.services.cluster.stopping import StopRequest, StopSignals
from ringserve.services.config import Config
from ringserve.services.config.sections import AUTO_JOURNAL
from ringserve.services.telemetry.logs import JsonLines, set_up_logs
from ringserve.workers.model.builtin import PREFIX, SMOLLM2, has_random_weights

if TYPE_CHECKING:
    from ringserve.services.cluster.local import LocalCluster

STOP_SECONDS = 60.0
"""Seconds that a cluster has to end, besides its drain seconds."""
MAX_LOG_BYTES = 64 << 20
LOG_SECONDS = 10.0
"""Seconds between two looks at the size of the log."""
TOLD_TO_END = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a cluster that a signal or `ringserve down` has ended while it started."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    "served_model_name": ("gateway.model_name",),
    "dtype": ("model.dtype",),
    "tensor_parallel_size": ("prefill.tp", "decode.tp"),
    "max_num_seqs": ("decode.max_batch",),
    "block_size": ("kv_cache.block_tokens",),
    "max_num_batched_tokens": ("prefill.chunk_tokens",),
    "quantization": ("model.quantization",),
}
"""Options of `vllm serve`, and the keys that they stand for."""
ELSEWHERE: Mapping[str, str] = {
    "api_key": "command lines are public; 'ringserve token' makes a token, auth.tokens names the file",
    "max_model_len": "the model's positions and the KV limit a context; kv_cache.tokens_per_rank sets the KV of a rank",
    "gpu_memory_utilization": "the room for KV is given in tokens: set kv_cache.tokens_per_rank",
    "pipeline_parallel_size": "ranks of a ring share a long prompt: set prefill.cp and decode.cp",
    "enforce_eager": "leave it out, or set model.compile=off",
    "enable_prefix_caching": "leave it out: prefixes are shared unless router.retain_prompts is false",
    "trust_remote_code": "leave it out: no code of a model is run",
}
"""Options of `vllm serve` without a key of the same meaning -> advice."""


def _as_in_vllm(name: str) -> Any:
    return Option(metavar="VALUE", help=f"as in vLLM: {' and '.join(ALIASES[name])}")


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    config: ConfigOptions
    name: ClusterName = "default"
    ray_address: str = option("run on this Ray cluster, auto or HOST:PORT (default: ray.address)", "ADDRESS", "")
    no_gateway: bool = flag("start none: 'ringserve gateway' runs elsewhere")
    drain_seconds: DrainSeconds = 0.0
    leave_ranks: bool = flag("on a Ray cluster: leave the ranks to the next cluster of this name, for three minutes")
    detach: bool = flag("return when the cluster serves, and leave it running")
    detached_log: str = hidden("")
    ready_file: Path | None = option("write the addresses here, as JSON, when the cluster serves", default=None)
    json: bool = flag("print the addresses as JSON")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: str = argument("Hugging Face model directory, or the name of a built-in model")
    up: UpOptions
    served_model_name: Annotated[str | None, _as_in_vllm("served_model_name")] = None
    dtype: Annotated[str | None, _as_in_vllm("dtype")] = None
    tensor_parallel_size: Annotated[str | None, _as_in_vllm("tensor_parallel_size")] = None
    max_num_seqs: Annotated[str | None, _as_in_vllm("max_num_seqs")] = None
    block_size: Annotated[str | None, _as_in_vllm("block_size")] = None
    max_num_batched_tokens: Annotated[str | None, _as_in_vllm("max_num_batched_tokens")] = None
    quantization: Annotated[str | None, _as_in_vllm("quantization")] = None
    host: str | None = option("as in vLLM: address of gateway.http (default: 127.0.0.1)", "HOST", None)
    port: int | None = option("as in vLLM: port of gateway.http (default: 8000)", "PORT", None)
    api_key: str | None = hidden(None)
    max_model_len: str | None = hidden(None)
    gpu_memory_utilization: str | None = hidden(None)
    pipeline_parallel_size: str | None = hidden(None)
    enforce_eager: bool = hidden(False)
    enable_prefix_caching: bool = hidden(False)
    trust_remote_code: bool = hidden(False)

    def overrides(self) -> list[str]:
        """Return the values that vLLM's options stand for, as --set takes them. Raises ConfigError."""
        for name, instead in ELSEWHERE.items():
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"--{name.replace('_', '-')}: there is no such option: {instead}")
        given = {keys: getattr(self, name) for name, keys in ALIASES.items()}
        values = [f"{key}={value}" for keys, value in given.items() if value is not None for key in keys]
        if self.host is not None or self.port is not None:
            values.append(f"gateway.http={self.host or '127.0.0.1'}:{8000 if self.port is None else self.port}")
        return values


@dataclass(frozen=True, kw_only=True)
class DownOptions:
    name: ClusterName = "default"
    timeout: float | None = option(
        "kill the cluster if it has not ended by then (default: 60 plus its --drain-seconds)", "SECONDS", None
    )
    json: JsonFlag = False


@command(
    "ringserve serve ./my-model --detach", "ringserve serve ./my-model --set prefill.cp=4 --set model.dtype=bfloat16"
)
def serve(options: ServeOptions) -> int:
    settings = options.up.config
    overrides = [*options.overrides(), *settings.overrides, f"model.path={options.model}"]
    settings = replace(settings, overrides=overrides)
    config = settings.load()
    if config.model.device == "cpu" and not (options.up.ray_address or config.ray.address):
        given = {role: settings.given(role) for role in ("prefill", "decode")}
        shape = fit_shape(len(os.sched_getaffinity(0)), given)
        settings = replace(settings, overrides=[*overrides, *shape])
        if shape:
            print(f"ringserve: sized for this machine: {' '.join(shape)}", file=sys.stderr)
    return up.run(replace(options.up, config=settings))


SHAPE = {"rings", "cp", "tp", "threads_per_rank", "pools"}
"""Keys of a role that say how many processes it has, and of how many threads."""


def fit_shape(cores: int, given: Mapping[str, set[str]]) -> list[str]:
    """Return values for roles whose shape is not `given`, for one machine without GPUs, as --set takes them.

    Each ring has one rank with a thread for every core: several would read their weights from the same memory, and
    wait for each other's messages (decision 0038).
    """
    values = ("cp=1", f"threads_per_rank={cores}")
    return [f"{role}.{value}" for role in ("prefill", "decode") if not given[role] & SHAPE for value in values]


@command(
    "ringserve up --detach",
    "ringserve up --set prefill.cp=4 --set gateway.listen=127.0.0.1:0 --ready-file ready.json",
    "ringserve up --config cluster.yaml --ray-address auto --no-gateway",
)
def up(options: UpOptions) -> int:
    if options.ray_address:
        overrides = [*options.config.overrides, f"ray.address={options.ray_address}"]
        options = replace(options, config=replace(options.config, overrides=overrides))
    config = options.config.load()  # before anything else: a wrong key must not cost half a minute
    require_free_name(options.name, os.getpid())
    if options.ready_file is not None and not options.ready_file.absolute().parent.is_dir():
        raise ConfigError(f"--ready-file: {options.ready_file} cannot be written, its directory does not exist")
    prepare(config.model.path, Console(stderr=True))
    return _detach(options, config) if options.detach else _serve(options, config)


@command("ringserve down", "ringserve down --name second --json")
def down(options: DownOptions) -> int:
    try:
        state = require_state(options.name)
    except NotFound:
        remove_state(options.name)  # of a cluster that ended by itself, as the error tells
        clear_abandoned()
        raise
    seconds = STOP_SECONDS + state.drain_seconds if options.timeout is None else options.timeout
    killed = end_cluster(state, seconds)
    remove_state(options.name)
    clear_abandoned()  # something is left if the cluster's process was killed
    if options.json:
        print(json.dumps({"name": options.name, "pid": state.pid, "killed": killed}))
    else:
        print(f"ringserve: cluster {options.name!r} is down")
    return 0


def _serve(options: UpOptions, config: Config) -> int:
    """Run a cluster in the foreground until it is told to end."""
    directory = RayDirectory()
    try:
        if can_fork(config):
            directory.start_forks()  # it loads for seconds, while this process imports Ray
        return _serve_in(directory, options, config)
    finally:
        directory.remove()


def _serve_in(directory: RayDirectory, options: UpOptions, config: Config) -> int:
    # Here, not above: commands that start no cluster need no Ray, whose import takes longer than all the rest.
    from ringserve.services.cluster.local import LocalCluster

    if config.logs.format == "json":
        sys.stdout, sys.stderr = JsonLines(sys.stdout, "up"), JsonLines(sys.stderr, "up")
    set_up_logs("up", config.logs.level, config.logs.format, config.logs.levels)
    signals = StopSignals()
    record = _Record(_starting(options, config, os.getpid()))
    cluster = record.cluster = LocalCluster(
        config,
        record.progress,
        signals.requested,
        with_gateway=not options.no_gateway,
        drain_seconds=options.drain_seconds,
        journal=journal_directory(config, options.name),
        name=options.name,
        leaves_ranks=options.leave_ranks,
        note_trouble=record.trouble,
        directory=directory,
    )
    if options.detached_log:
        log = (Path(options.detached_log), signals.requested)
        threading.Thread(target=_bound_log, args=log, name="log", daemon=True).start()
    try:
        record.begin()
        cluster.start()
        _announce(options, config, record.ready())
        cluster.watch()
        cluster.drain(signals.insisted)
        record.progress("stopping")
    except StopRequest:
        record.progress("stopping")
    except Exception as error:
        record.failed(error)
        raise
    finally:
        try:
            record.end()
        finally:
            cluster.stop()
    return 0


def journal_directory(config: Config, name: str) -> str:
    """Return the directory of the router's journal; empty if there is to be none.

    "auto" is a directory for each name and model of a cluster, since a journal holds that model's token ids: the next
    cluster of that name with that model goes on with the conversations.
    """
    if config.router.journal != AUTO_JOURNAL:
        return config.router.journal
    model = hashlib.sha256(config.model.path.encode()).hexdigest()[:12]
    return str(state_directory() / "journals" / f"{name}-{model}")


def _starting(options: UpOptions, config: Config, pid: int) -> ClusterState:
    """Return the first state of a cluster that a process starts."""
    return ClusterState(
        name=options.name,
        pid=pid,
        started=started_after_boot(pid),
        num_rings=sum(pool.rings for pool in config.pools),
        log=options.detached_log,
        drain_seconds=options.drain_seconds,
    )


class _Record:
    """State file of the cluster that this process runs. It follows the stages that ClusterStage draws."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.cluster: LocalCluster | None = None

    def begin(self) -> None:
        claim_name(self._state)

    def progress(self, line: str) -> None:
        """Tell a line of progress, and note it while the cluster starts."""
        print("ringserve:", line, file=sys.stderr, flush=True)
        if self._state.stage is ClusterStage.STARTING and self.cluster is not None:
            told = (*self._state.progress, line)
            self._note(replace(self._state, progress=told, rings_serving=self.cluster.rings_serving))

    def ready(self) -> ClusterState:
        assert self.cluster is not None, "the cluster has started"
        self._note(
            replace(
                self._state,
                stage=ClusterStage.READY,
                gateway=self.cluster.gateway_address,
                http=self.cluster.http_address,
                metrics=self.cluster.metrics_address,
                router=self.cluster.router_endpoint,
                secret=os.environ.get(SECRET_VARIABLE, ""),
            )
        )
        return self._state

    def trouble(self, reason: str) -> None:
        """Note why a cluster does not serve, or that it does again."""
        self._note_if_possible(replace(self._state, reason=reason))

    def failed(self, error: Exception) -> None:
        """Note why a cluster that served has ended; a start that failed has told its reason."""
        if self._state.stage is ClusterStage.READY:
            reason = str(error) or type(error).__name__
            self._note_if_possible(replace(self._state, stage=ClusterStage.ENDED, reason=reason))

    def end(self) -> None:
        if self._state.stage is not ClusterStage.ENDED:
            remove_state_of(self._state.name, self._state.pid)

    def _note_if_possible(self, state: ClusterState) -> None:
        try:
            self._note(state)
        except ConfigError as error:
            print("ringserve:", error, file=sys.stderr, flush=True)

    def _note(self, state: ClusterState) -> None:
        self._state = state
        write_state(state)


def _announce(options: UpOptions, config: Config, state: ClusterState) -> None:
    """Tell that a cluster serves, and where."""
    shown = ("gateway", "http", "metrics", "router", "pid", "name")
    text = json.dumps({key: getattr(state, key) for key in shown})
    if options.ready_file is not None:
        _write_ready_file(options.ready_file, text)
    endpoint = f"gateway at {state.gateway}" if state.gateway else f"router at {state.router}"
    stop = f"pid {state.pid}, log {state.log}" if options.detach else "stop with Ctrl-C or 'ringserve down'"
    print(text if options.json else f"ringserve: ready, {endpoint}, model {config.model.path} ({stop})", flush=True)
    if has_random_weights(config.model.path) and not options.json:
        print(
            f"ringserve: the weights of {config.model.path} are random, so its text means nothing; "
            f"'ringserve serve {PREFIX}{SMOLLM2}' serves a real model, 'ringserve serve DIR' yours",
            flush=True,
        )


def _write_ready_file(path: Path, text: str) -> None:
    """Write the file as a whole or not at all. Raises ConfigError."""
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file: {path} cannot be written: {error.strerror}") from error


def remove_state_of(name: str, pid: int) -> None:
    """Remove the state file of one process alone: another cluster may have taken the name meanwhile."""
    state = read_record(name)
    if state is not None and state.pid == pid:
        remove_state(name)


def _detach(options: UpOptions, config: Config) -> int:
    """Run the same command in a session of its own, and wait until it serves or ends."""
    log_path = state_directory() / f"{options.name}.log"
    options = replace(options, detached_log=str(log_path))
    process = _start_detached(_detached_command(options), log_path)
    try:
        # Not left to the process: it needs seconds to load, in which `down` and `status` must know of it.
        with suppress(psutil.NoSuchProcess):
            claim_name(_starting(options, config, process.pid))
        state = _await_ready(process, options.name, 3 * config.timeouts.start, log_path)
    except BaseException:
        process.terminate()
        process.wait(STOP_SECONDS)
        remove_state_of(options.name, process.pid)
        raise
    _announce(options, config, state)
    return 0


def _detached_command(options: UpOptions) -> list[str]:
    words = [sys.executable, "-P", "-m", "ringserve.services.cli.main", "up", "--name", options.name]
    words += ["--detached-log", options.detached_log, "--drain-seconds", str(options.drain_seconds)]
    if options.config.config is not None:
        words += ["--config", str(options.config.config.resolve())]
    for item in options.config.overrides:
        words += ["--set", item]
    words += ["--no-gateway"] if options.no_gateway else []
    return [*words, "--leave-ranks"] if options.leave_ranks else words


def _start_detached(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file. Raises ConfigError."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
        log = log_path.open("ab")  # so that the file may be cut while processes write to it: see `_bound_log`
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {log_path} cannot be written: {error.strerror}") from error
    with log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _bound_log(log_path: Path, stopped: threading.Event) -> None:
    """Keep the log of a detached cluster below a limit, and its earlier lines in one older file beside it."""
    while not stopped.wait(LOG_SECONDS):
        with suppress(OSError):
            if log_path.stat().st_size > MAX_LOG_BYTES:
                with suppress(OSError):  # on a full disk the older file is lost
                    shutil.copyfile(log_path, log_path.with_suffix(".log.1"))
                os.truncate(log_path, 0)


def _await_ready(process: subprocess.Popen[bytes], name: str, seconds: float, log_path: Path) -> ClusterState:
    """Wait until a detached cluster serves, and tell its progress meanwhile. Raises Unavailable."""
    deadline = time.monotonic() + seconds
    num_told = 0
    while True:
        state = read_record(name)
        if state is not None and state.pid == process.pid:
            for line in state.progress[num_told:]:
                print("ringserve:", line, file=sys.stderr, flush=True)
            num_told = max(num_told, len(state.progress))
            if state.stage is ClusterStage.READY:
                return state
        try:
            status = process.wait(0.1)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise Unavailable(f"the cluster did not start in time; its log is {log_path}") from None
        else:
            why = "it was told to end" if status in TOLD_TO_END else _last_reason(log_path)
            raise Unavailable(f"the cluster did not start: {why} (log: {log_path})")


def _last_reason(log_path: Path) -> str:
    """Return the last sentence of the program itself in a log of either format."""
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    messages = [json.loads(line)["message"] if line.startswith('{"ts"') else line for line in lines]
    reasons = [line.removeprefix("ringserve: ") for line in messages if line.startswith("ringserve: ")]
    return reasons[-1] if reasons else "no reason was given"
