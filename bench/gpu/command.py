"""All figures of one NVIDIA GPU beside their targets: kernels, steps, loading, KV between rings, the whole service.

    python -m bench gpu
    python -m bench gpu --only kernels,steps --json

The model has the shape of Llama 3 8B and random weights. Each part runs in a process of its own, whose lines are
printed as they are measured: one that fails says so, and the others go on. `service` and `tokens` need Ray. With
`--device cpu` the same code runs on a small model; the targets are of an H100 and do not apply.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.gpu import rank
from bench.gpu.table import GPU, KV_GIGABYTES, TOY, Line, Place
from bench.options import Subcommands
from bench.rings import kv_carrier
from ringserve.cp_core.errors import ConfigError

NO_GPU = "no GPU here: torch finds no CUDA device"
ROOT = Path(__file__).parents[2]
CASES = ("tests/gpu_cases.py", "tests/cp_core/attention/triton_cases.py")
# Limit of a part: it may write and load weights of 16 GB and compile kernels whose code is not on disk.
PART_SECONDS = 900.0
JOIN_SECONDS = 10.0


def cases(place: Place) -> Iterator[Line]:
    """Run the tests that only a GPU can run, in a process of their own: Triton compiles its kernels there.

    The tests need pytest alone: the project's configuration of pytest names plugins that a GPU's machine may lack.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), *CASES]
    path = os.pathsep.join([str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command if place.is_gpu else [*command, "--collect-only"],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=sys.stderr,
    )
    yield Line(part="cases", text="tests of the GPU: exit status", value=done.returncode, limit=0.0)


def kv(place: Place) -> Iterator[Line]:
    """Measure KV between two processes, by NIXL and by sockets."""
    load = kv_carrier.Load(
        message_bytes=place.kv_message_bytes, count=place.kv_messages, repeats=place.rounds, device=place.device
    )
    for candidate in (kv_carrier.KV_BY_NIXL, kv_carrier.KV_TRANSFER):
        row = kv_carrier.measure(candidate, load)
        rates, carrier = row.summary("gigabytes_per_second"), row.keys["carrier"]
        is_judged = place.is_gpu and carrier == "kv nixl"
        yield Line(
            part="kv",
            text=f"{carrier}, {load.message_bytes:,} bytes a layer",
            value=rates.p50,
            unit="GB/s",
            limit=KV_GIGABYTES if is_judged else None,
            is_at_least=True,
            beside=f"best {rates.most:.3g} GB/s",
        )


def service(place: Place) -> Iterator[Line]:
    """Run the part of the same name. Only the parts of `bench.gpu.service` need Ray, so it is imported here."""
    from bench.gpu import service as parts

    return parts.service(place)


def tokens(place: Place) -> Iterator[Line]:
    """Run the part of the same name. Only the parts of `bench.gpu.service` need Ray, so it is imported here."""
    from bench.gpu import service as parts

    return parts.tokens(place)


PARTS: dict[str, Callable[[Place], Iterator[Line]]] = {
    "cases": cases,
    "kernels": rank.kernels,
    "steps": rank.steps,
    "loading": rank.loading,
    "kv": kv,
    "tokens": tokens,
    "service": service,
}


def run_part(name: str, place: Place, answer: Connection) -> None:
    """Send a part's lines one by one, and then why it failed, or ""."""
    try:
        for line in PARTS[name](place):
            answer.send(line)
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
    else:
        answer.send("")


def run_apart(name: str, place: Place, tell: Callable[[Line], None]) -> str:
    """Run a part in a process of its own, which gives the GPU's memory back at its end -> why it failed, or ""."""
    ends = time.monotonic() + PART_SECONDS
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=run_part, args=(name, place, there))
    process.start()
    there.close()
    try:
        while here.poll(max(0.0, ends - time.monotonic())):
            told = here.recv()
            if isinstance(told, str):
                return told
            tell(told)
        return f"it did not end within {PART_SECONDS:g} s"
    except EOFError:
        process.join(JOIN_SECONDS)
        return f"its process ended with status {process.exitcode}"
    finally:
        process.join(JOIN_SECONDS)
        process.kill()


def add(commands: Subcommands) -> None:
    parser = commands.add_parser("gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas ({','.join(PARTS)})")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a toy, to try the code")
    parser.add_argument("--rounds", type=int, help="measurements of each figure (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object for each part")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the parts; return 1 if one of them failed. A target that is missed is a line, not a failure."""
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ConfigError(f"--only: there is no part {unknown[0]!r}; allowed are {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    if options.rounds is not None and options.rounds < 1:
        raise ConfigError(f"--rounds: {options.rounds} is too few; allowed are 1 or more")
    place, num_failed = GPU if options.device == "cuda" else TOY, 0
    place = replace(place, rounds=options.rounds or place.rounds)
    if place.is_gpu and not options.json:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name in chosen:
        lines: list[Line] = []

        def tell(line: Line, lines: list[Line] = lines) -> None:
            lines.append(line)
            if not options.json:
                print(line, flush=True)

        began, reason = time.perf_counter(), run_apart(name, place, tell)
        seconds = time.perf_counter() - began
        num_failed += bool(reason)
        if options.json:
            told = [asdict(line) | {"verdict": line.verdict} for line in lines]
            print(json.dumps({"part": name, "seconds": seconds, "failed": reason, "lines": told}), flush=True)
            continue
        print(f"{name:8} {f'FAILED: {reason}' if reason else 'done'}, {seconds:.0f} s", flush=True)
    return 1 if num_failed else 0
