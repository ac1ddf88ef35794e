"""`ringserve up`: run a cluster on this machine, or on one of Ray, until Ctrl-C, SIGTERM or `ringserve down`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from cp_core.errors import ConfigError, Unavailable
from services.cli.import_model import prepare
from services.cli.options import Subcommands, add_config_options, check_drain_seconds, config_of
from services.cluster.local import LocalCluster
from services.cluster.state import (
    ClusterState,
    read_state,
    remove_state,
    started_after_boot,
    state_directory,
    write_state,
)
from services.cluster.stopping import StopRequest, StopSignals
from services.telemetry.logs import JsonLines, set_up_logs

STOP_SECONDS = 60.0
"""Seconds for a detached cluster that does not start in time to end."""
EXAMPLE = """example:
  ringserve up --config cluster.yaml --detach
  ringserve up --set prefill.cp=4 --set gateway.listen=127.0.0.1:0 --ready-file ready.json
  ringserve up --config cluster.yaml --ray-address auto --no-gateway
"""


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "up",
        help="start a cluster on this machine, or the rings on a Ray cluster",
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_config_options(parser)
    parser.add_argument(
        "--name", default="default", help="name of the cluster for 'down' and 'status' (default: default)"
    )
    parser.add_argument(
        "--ray-address", help="run on this Ray cluster, auto or HOST:PORT (default: ray.address of the configuration)"
    )
    parser.add_argument("--no-gateway", action="store_true", help="start none: 'ringserve gateway' runs elsewhere")
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=0.0,
        help="how long turns may go on when it is told to end; a second signal ends them (default: 0)",
    )
    parser.add_argument("--detach", action="store_true", help="return when the cluster serves, and leave it running")
    parser.add_argument("--ready-file", type=Path, help="write the addresses here, as JSON, when the cluster serves")
    parser.add_argument("--json", action="store_true", help="print the addresses as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand."""
    if options.ray_address is not None:
        options.set = [*(options.set or ()), f"ray.address={options.ray_address}"]
    check_drain_seconds(options.drain_seconds)
    config = config_of(options)  # before anything else: a wrong key must not cost half a minute
    running = read_state(options.name)
    if running is not None:
        raise ConfigError(
            f"--name: a cluster named {options.name!r} runs already (pid {running.pid}, gateway {running.gateway}); "
            f"choose another name or 'ringserve down --name {options.name}'"
        )
    if options.ready_file is not None and not options.ready_file.absolute().parent.is_dir():
        raise ConfigError(f"--ready-file: {options.ready_file} cannot be written, its directory does not exist")
    prepare(config.model.path, Console(stderr=True))
    if options.detach:
        return _detach(options, config.timeouts.start)
    if config.logs.format == "json":
        sys.stderr = JsonLines(sys.stderr, "up")
    set_up_logs("up", config.logs.level, config.logs.format)
    signals = StopSignals()
    show = partial(print, "ringserve:", file=sys.stderr, flush=True)
    cluster = LocalCluster(
        config,
        show,
        signals.requested,
        with_gateway=not options.no_gateway,
        drain_seconds=options.drain_seconds,
    )
    try:
        cluster.start()
        _announce(options, cluster)
        cluster.watch()
        cluster.drain(signals.insisted)
        show("stopping")
    except StopRequest:
        show("stopping")
    finally:
        try:
            remove_state_of(options.name)
        finally:
            cluster.stop()
    return 0


def _announce(options: argparse.Namespace, cluster: LocalCluster) -> None:
    state = ClusterState(
        name=options.name,
        pid=os.getpid(),
        started=started_after_boot(os.getpid()),
        gateway=cluster.gateway_address,
        http=cluster.http_address,
        metrics=cluster.metrics_address,
        router=cluster.router_endpoint,
        drain_seconds=options.drain_seconds,
    )
    write_state(state)
    shown = ("gateway", "http", "metrics", "router", "pid", "name")
    text = json.dumps({key: getattr(state, key) for key in shown})
    if options.ready_file is not None:
        _write_ready_file(options.ready_file, text)
    message = f"ringserve: ready, {_endpoint(state.gateway, state.router)}; stop with Ctrl-C or 'ringserve down'"
    print(text if options.json else message, flush=True)


def _write_ready_file(path: Path, text: str) -> None:
    """Write the file as a whole or not at all. Raises ConfigError."""
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file: {path} cannot be written: {error.strerror}") from error


def _endpoint(gateway: str, router: str) -> str:
    return f"gateway at {gateway}" if gateway else f"router at {router}"


def remove_state_of(name: str) -> None:
    """Remove the state file of this process alone: another cluster may have taken the name meanwhile."""
    state = read_state(name)
    if state is not None and state.pid == os.getpid():
        remove_state(name)


def _detach(options: argparse.Namespace, start_timeout: float) -> int:
    """Run the same command in a session of its own, and wait until it serves or ends."""
    log_path = state_directory() / f"{options.name}.log"
    with tempfile.TemporaryDirectory(prefix="ringserve-up-", ignore_cleanup_errors=True) as directory:
        ready = Path(directory) / "ready.json"
        process = _start_detached(_detached_command(options, ready), log_path)
        try:
            _await_ready(process, ready, 3 * start_timeout, log_path)
        except (KeyboardInterrupt, Unavailable):
            process.terminate()
            process.wait(STOP_SECONDS)
            raise
        text = ready.read_text(encoding="utf-8").strip()
    if options.ready_file is not None:
        _write_ready_file(options.ready_file, text)
    state = json.loads(text)
    endpoint = _endpoint(state["gateway"], state["router"])
    message = f"ringserve: ready, {endpoint} (pid {state['pid']}, log {log_path})"
    print(text if options.json else message, flush=True)
    return 0


def _detached_command(options: argparse.Namespace, ready: Path) -> list[str]:
    command = [sys.executable, "-m", "services.cli.main", "up", "--name", options.name, "--ready-file", str(ready)]
    command += ["--drain-seconds", str(options.drain_seconds)]
    if options.config is not None:
        command += ["--config", str(options.config.resolve())]
    for item in options.set or ():
        command += ["--set", item]
    return [*command, "--no-gateway"] if options.no_gateway else command


def _start_detached(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file. Raises ConfigError."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("wb")
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {log_path} cannot be written: {error.strerror}") from error
    with log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _await_ready(process: subprocess.Popen[bytes], ready: Path, seconds: float, log_path: Path) -> None:
    """Wait until a detached cluster has written its addresses. Raises Unavailable."""
    deadline = time.monotonic() + seconds
    while not ready.exists():
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise Unavailable(f"the cluster did not start in time; its log is {log_path}") from None
        else:
            raise Unavailable(f"the cluster did not start: {_last_reason(log_path)} (log: {log_path})")


def _last_reason(log_path: Path) -> str:
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    reasons = [line.removeprefix("ringserve: ") for line in lines if line.startswith("ringserve: ")]
    return reasons[-1] if reasons else "no reason was given"
