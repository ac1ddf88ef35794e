"""Hardware profile: rates of one process (a GPU), its links and its overheads. Shipped or measured, as JSON.

The router, offline planning and the simulator read one if it is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from ringserve.cp_core.cost.model import PrefillRates
from ringserve.cp_core.errors import ConfigError
from ringserve.views import RingRates

SUFFIX = ".json"
# Values whose names end so may be 0. All others are rates or sizes, and must be above 0.
MAY_BE_ZERO = ("_seconds", "free_rows", "overlap")

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConstants:
    """FLOP/s, bytes/s and seconds of one process. Links are the ring's, between hosts.

    A hop's latency is all time before its first byte, with the wait for a late peer. A layer has three overheads: one
    always, one for each rank after the first, one if there are cached tokens. Sums of tensor parallelism are ring
    all-reduces, in bytes/s inside one host and over several. A chain has the overlap of a ring unless its own was
    measured; `chain_overhead` is as in PrefillRates, `lone_speed` as in RingRates.
    """

    gemm_flops: float
    attention_flops: float
    link_bytes_per_second: float
    link_latency_seconds: float
    all_to_all_bytes_per_second: float
    all_to_all_latency_seconds: float
    host_sum_bytes_per_second: float
    sum_bytes_per_second: float
    overlap: float = 1.0
    layer_overhead_seconds: float = 0.0
    rank_overhead_seconds: float = 0.0
    cached_overhead_seconds: float = 0.0
    chain_overhead: float = 1.0
    chain_overlap: float | None = None
    lone_speed: float = 1.0

    def rates(self, num_ranks: int, *, is_cached: bool) -> PrefillRates:
        """Return the rates of a rank in a ring of `num_ranks`."""
        overhead = self.layer_overhead_seconds + (num_ranks - 1) * self.rank_overhead_seconds
        return PrefillRates(
            ring=RingRates(
                gemm_flops=self.gemm_flops,
                attention_flops=self.attention_flops,
                link_bytes_per_second=self.link_bytes_per_second,
                link_latency_seconds=self.link_latency_seconds,
                overlap=self.overlap,
                lone_speed=self.lone_speed,
            ),
            layer_overhead_seconds=overhead + (self.cached_overhead_seconds if is_cached else 0.0),
            all_to_all_bytes_per_second=self.all_to_all_bytes_per_second,
            all_to_all_latency_seconds=self.all_to_all_latency_seconds,
            chain_overhead=self.chain_overhead,
            chain_overlap=self.chain_overlap,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConstants:
    """Bytes/s and seconds of one process in a decode step.

    One attention call costs `attention_seconds`, the reading of its KV, and `row_seconds` for every query row after the
    first `free_rows`. An exchange of queries has a latency of `hop_seconds`, a collective of `all_to_all_seconds`; each
    layer of a ring of several ranks costs `ring_seconds` more. A tensor parallel sum has a latency of `sum_seconds`,
    plus `host_seconds` for every host after the first.
    """

    weight_bytes_per_second: float
    kv_bytes_per_second: float
    attention_seconds: float
    free_rows: int
    row_seconds: float
    hop_seconds: float
    all_to_all_seconds: float
    ring_seconds: float
    sum_seconds: float
    host_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """Constants of one kind of hardware; `source` says where they come from.

    `kv_link_bytes_per_second` is the rate at which one process sends migrating KV beside its ring's messages. Up to
    `processes_per_host` processes sum within one host, without links between hosts.
    """

    name: str
    source: str
    processes_per_host: int
    memory_bytes: float
    kv_link_bytes_per_second: float
    prefill: PrefillConstants
    decode: DecodeConstants

    def num_hosts(self, tp: int) -> int:
        """Return the hosts over which `tp` tensor parallel processes spread."""
        return -(-tp // self.processes_per_host)


def shipped_profiles() -> tuple[str, ...]:
    """Return the names that `read_profile` knows."""
    names = (entry.name for entry in files("ringserve.cp_core.cost").joinpath("profiles").iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


def read_profile(name: str) -> HardwareProfile:
    """Return a shipped profile by its name, or one in a JSON file by its path. Raises ConfigError."""
    if name in shipped_profiles():
        return parse_profile(
            files("ringserve.cp_core.cost").joinpath("profiles", name + SUFFIX).read_text(encoding="utf-8"), name
        )
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"hardware profile {name!r} is unknown; allowed are {', '.join(shipped_profiles())}, or the path of a file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hardware profile {name} cannot be read: {error}") from error
    return parse_profile(text, name)


def parse_profile(text: str, where: str) -> HardwareProfile:
    """Return the profile in `text`: every constant without a default is needed, and no unknown one is allowed.

    Raises ConfigError naming `where` and the key.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"hardware profile {where} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"hardware profile {where} does not hold a JSON object")
    sections: dict[str, object] = {
        "prefill": _section(PrefillConstants, content.get("prefill"), where, "prefill."),
        "decode": _section(DecodeConstants, content.get("decode"), where, "decode."),
    }
    return _section(HardwareProfile, content | sections, where, "")


def format_profile(profile: HardwareProfile) -> str:
    """Return the profile as JSON that `read_profile` takes."""
    return json.dumps(asdict(profile), indent=2) + "\n"


def _section(kind: type[Section], content: object, where: str, prefix: str) -> Section:
    if not isinstance(content, Mapping):
        raise ConfigError(f"hardware profile {where} has no section {prefix.rstrip('.')!r}")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(content.keys() - known.keys()):
        raise ConfigError(f"hardware profile {where}: {prefix}{unknown[0]} is unknown; allowed are {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in content:
            values[name] = _checked(name, field.type, content[name], f"hardware profile {where}: {prefix}{name}")
        elif field.default is MISSING:
            raise ConfigError(f"hardware profile {where}: {prefix}{name} is missing")
    return kind(**values)


def _checked(name: str, annotation: object, value: object, where: str) -> object:
    if annotation == "float | None" and value is not None:
        annotation = "float"
    if annotation not in ("float", "int"):
        if annotation == "str" and not isinstance(value, str):
            raise ConfigError(f"{where} is {value!r}; a string is needed")
        return value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}; a number is needed")
    if annotation == "int" and not isinstance(value, int):
        raise ConfigError(f"{where} is {value!r}; a whole number is needed")
    if name.endswith("overlap") and not 0.0 <= value <= 1.0:
        raise ConfigError(f"{where} is {value}; allowed are 0 to 1")
    if name == "lone_speed" and value < 1.0:
        raise ConfigError(f"{where} is {value}; allowed is 1 or more")
    may_be_zero = name.endswith(MAY_BE_ZERO)
    if value < 0 or (value == 0 and not may_be_zero):
        raise ConfigError(f"{where} is {value}; allowed is any number {'from' if may_be_zero else 'above'} 0")
    return value
