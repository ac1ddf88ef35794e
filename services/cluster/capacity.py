"""Machine capacity: its resources, a configuration checked against them, and when to load a spare process.

A cluster checks its configuration here before it starts. The keepers of the router and of the gateway ask when to load
the spare that takes over if the process dies. Nothing here changes the machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.thirdparty import pynvml

from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import Config
from ringserve.services.config.sections import ModelConfig, Pool
from ringserve.workers.model.info import tensor_share
from ringserve.workers.protocol.ranks import ModelInfo

MAX_PROCESSES_PER_CORE = 8
"""Processes of ranks per core, at most: each takes seconds of the core to start, and more miss the start timeout."""
PROCESS_BYTES = 300e6
"""Memory of a rank's process without weights and KV: Python, torch, Ray."""
LEAST_PARAMETERS = 50_000_000
"""Parameters of a model from which bfloat16 is advised: in smaller ones matrix products take little of the time."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SPARE_WAIT = 15.0
"""Seconds that a process serves before its spare is loaded: the cores belong to the first turns of a service, or to
turns that were cut off and begin again."""
FAILED_SPARE_WAIT = 60.0
"""Seconds from the end of a spare that has not served to the load of another."""
BUSY_SPARE_WAIT = 60.0
"""Longest further wait for an idle core; a service that is never idle needs a spare most."""
IDLE_CORES = 0.8
"""Cores idle for `IDLE_SECONDS` that the load of a spare waits for: it takes one core for a second or two."""
IDLE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Resources of one machine that processes of ranks can take now. `gpu_bytes` is the memory of the smallest GPU."""

    cores: int
    memory_bytes: float
    gpus: int = 0
    gpu_bytes: float = 0.0


def this_machine() -> Machine:
    """Read the resources of this machine, within the limits of this process."""
    memory = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no cgroup of version 2, or "max": no limit
        memory = min(memory, float(CGROUP_LIMIT.read_text(encoding="ascii")))
    gpus = _gpu_bytes()
    chosen = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        gpus=len(gpus) if chosen is None else min(len(gpus), len(chosen)),
        gpu_bytes=min(gpus, default=0.0),
    )


def idle_seconds() -> float:
    """Return the seconds that all cores of this machine together were idle since its start."""
    return float(psutil.cpu_times().idle)


class SpareSchedule:
    """When the spare of a process is loaded: once its predecessor has served for a while and a core is idle.

    `has_spare` is False if the configuration wants no spare; `idle_seconds` is a function like the one above. Ask
    `is_due` twice a second or more often: it looks at the cores between two questions.
    """

    def __init__(self, *, has_spare: bool = True, idle_seconds: Callable[[], float] = idle_seconds) -> None:
        self._has_spare = has_spare
        self._idle_seconds = idle_seconds
        self._earliest = self._seen_at = self._seen_idle = 0.0
        self._has_idle_core = False

    def wait(self, now: float, seconds: float = SPARE_WAIT) -> None:
        """Have no spare loaded for `seconds` after `now`, which is the time of any clock in seconds."""
        self._earliest = now + seconds

    def is_due(self, now: float) -> bool:
        """Return whether it is time to load a spare."""
        if not self._has_spare:
            return False
        if now - self._seen_at >= IDLE_SECONDS:
            idle = self._idle_seconds()
            self._has_idle_core = idle - self._seen_idle >= IDLE_CORES * (now - self._seen_at)
            self._seen_at, self._seen_idle = now, idle
        return now >= self._earliest and (self._has_idle_core or now >= self._earliest + BUSY_SPARE_WAIT)


def _gpu_bytes() -> list[float]:
    """Return the memory of every NVIDIA GPU, as Ray finds them; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [float(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def check_fits(config: Config, model: ModelInfo, machine: Machine, draft: ModelInfo | None = None) -> None:
    """Check that all rings fit on one machine, each with a `draft` model. Raises ConfigError for the largest pool."""
    sizes = {pool.key: pool.rings * pool.cp * pool.tp for pool in config.pools}
    processes = sum(sizes.values())
    largest = max(sizes, key=lambda key: sizes[key])
    named = f"{largest}: {processes} processes of ranks" + (
        f" ({', '.join(f'{count} of {key}' for key, count in sizes.items())})" if len(sizes) > 1 else ""
    )
    smaller = "choose smaller or fewer rings, or a Ray cluster (ray.address)"
    sharing = ranks_of_gpu(config.model)
    if config.model.device == "cuda" and processes > sharing * machine.gpus:
        need = "a GPU each" if sharing == 1 else f"{config.model.gpus_per_rank:g} of a GPU each"
        smaller = f"let ranks share a GPU (model.gpus_per_rank), {smaller}" if machine.gpus else smaller
        raise ConfigError(f"{named} need {need}, and this machine offers {machine.gpus}; {smaller}")
    if processes > MAX_PROCESSES_PER_CORE * machine.cores:
        raise ConfigError(
            f"{named} do not start on {machine.cores} cores, which take {MAX_PROCESSES_PER_CORE} each; {smaller}"
        )
    if config.model.device == "cuda":
        for counts in _of_one_gpu(config, sharing):
            _check_memory(config, model, counts, machine.gpu_bytes, "on each GPU", draft)
    else:
        counts = [(pool, pool.rings * pool.cp * pool.tp) for pool in config.pools]
        _check_memory(config, model, counts, machine.memory_bytes, "free", draft)


PACKAGES = {
    ("model.attention_backend", "flash_attn_3"): (("fa3_fwd_interface",), "pip install 'ringserve[gpu]'"),
    ("model.attention_backend", "flash_attn"): (("flash_attn",), "pip install 'ringserve[flash-attn]'"),
    ("kv_transfer.carrier", "nixl"): (("nixl_cu12", "nixl_cu13"), "pip install 'ringserve[nixl]'"),
}
"""Modules of which a value of the configuration needs one, and the package that installs it."""


def check_programs(config: Config, torch_version: str = "", environment: Mapping[str, str] = os.environ) -> None:
    """Check that this machine has the programs that its ranks need. Raises ConfigError, which names missing ones."""
    chosen = {
        ("model.attention_backend", config.model.attention_backend),
        ("kv_transfer.carrier", config.kv_carrier),
    }
    lacking = [
        f"{modules[0]} for {key} {value!r} ({remedy})"
        for (key, value), (modules, remedy) in PACKAGES.items()
        if (key, value) in chosen and not any(map(find_spec, modules))
    ]
    if config.model.device == "cuda":
        if "+cpu" in (torch_version := torch_version or version("torch")):
            lacking.append(f"torch for CUDA, not {torch_version} (install it from another index)")
        if not environment.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
            lacking.append("a C compiler, by which Triton starts its kernels (gcc or clang)")
    if lacking:
        raise ConfigError(f"this machine lacks what the configuration needs: {'; '.join(lacking)}")


def carrier_advice(config: Config) -> str:
    """Return a sentence if KV between GPUs goes by sockets for want of a package; "" otherwise."""
    modules, remedy = PACKAGES["kv_transfer.carrier", "nixl"]
    if config.model.device != "cuda" or config.kv_carrier != "auto" or any(map(find_spec, modules)):
        return ""
    return f"KV goes between rings by sockets, at a tenth of NIXL's rate or less; {remedy}, or nixl-cu13 for CUDA 13"


def ranks_of_gpu(model: ModelConfig) -> int:
    """Return how many processes of ranks Ray puts on one GPU."""
    return int(1.0 / model.gpus_per_rank + 1e-9)


def _of_one_gpu(config: Config, sharing: int) -> list[list[tuple[Pool, int]]]:
    """Return groups of processes that can share one GPU, as counts per pool.

    If a rank has a whole GPU, each group is one process; else the one group is filled pool by pool.
    """
    if sharing == 1:
        return [[(pool, 1)] for pool in config.pools]
    counts, left = [], sharing
    for pool in config.pools:
        count = min(left, pool.rings * pool.cp * pool.tp)
        left -= count
        counts.append((pool, count))
    return [counts]


def dtype_advice(config: ModelConfig, model: ModelInfo, *, can_multiply: bool) -> str:
    """Return a sentence if bfloat16 or float32 would be faster on this machine's processor, "" otherwise.

    `can_multiply`: the processor has instructions for bfloat16. Without them it takes more time than float32.
    """
    if config.device != "cpu":
        return ""
    if config.dtype == "float32" and can_multiply and model.num_parameters >= LEAST_PARAMETERS:
        return "this processor multiplies bfloat16: model.dtype=bfloat16 would be faster here, with rounded results"
    if config.dtype != "float32" and not (config.dtype == "bfloat16" and can_multiply):
        return f"this processor does not multiply {config.dtype}: model.dtype=float32 would be faster here"
    return ""


def _check_memory(
    config: Config,
    model: ModelInfo,
    counts: Sequence[tuple[Pool, int]],
    memory_bytes: float,
    where: str,
    draft: ModelInfo | None,
) -> None:
    """Check that one memory holds weights and KV of `counts` processes of each pool. Raises ConfigError."""
    fixed, kv_token = 0.0, 0
    for pool, count in counts:
        share = tensor_share(model, pool.tp, f"{pool.key}.tp")
        # If the head is the embedding, a decode rank on a CPU holds it twice: as the embedding, and packed as the head.
        # Prefill ranks share the packed one, or pack none.
        copied = share.tied_parameters if pool.role == "decode" and config.model.device == "cpu" else 0
        fixed += count * (PROCESS_BYTES + (share.num_parameters + copied) * share.element_bytes)
        kv_token += count * share.kv_bytes_per_token
        if draft is not None and pool.role == "decode":
            # On the first rank of each ring.
            kv_bytes = config.decode.max_batch * config.decode.draft_context * draft.kv_bytes_per_token
            weights = (draft.num_parameters + draft.tied_parameters) * draft.element_bytes
            fixed += min(count, pool.rings) * (weights + kv_bytes)
    cache, ranks = config.kv_cache, sum(count for _, count in counts)
    # If `memory_fraction` decides the number of tokens, one block at least has to fit.
    name, tokens = "tokens_per_rank", cache.tokens_per_rank
    if cache.memory_fraction:
        name, tokens = "memory_fraction", cache.block_tokens
    if fixed + tokens * kv_token <= memory_bytes:
        return
    fitting = int((memory_bytes - fixed) / kv_token) // cache.block_tokens * cache.block_tokens
    raise ConfigError(
        f"kv_cache.{name}: {tokens} tokens on each of {ranks} ranks need "
        f"{tokens * kv_token / 1e9:.1f} GB, their weights and processes {fixed / 1e9:.1f} GB, and "
        f"{memory_bytes / 1e9:.1f} GB are {where}; "
        + (f"{fitting} tokens fit" if fitting > 0 else "no KV fits beside the weights, choose fewer ranks")
    )
