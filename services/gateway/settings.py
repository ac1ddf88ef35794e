"""Settings of a gateway process, which `services.cluster.local` writes as JSON and the process reads.

They hold paths to secrets, never secrets.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Self

from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.orchestration.protocol.rings import LOST_SECONDS
from ringserve.services.auth.tls import ServerTls
from ringserve.services.config.sections import HttpConfig, TracingConfig


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Gateway settings.

    `follow_stdin` ends the gateway when standard input closes, which happens when its parent ends. With `is_spare` the
    gateway waits until its parent writes the final settings to standard input, as one line of JSON, and serves with
    those. It loads in a thread whose nice value is `niceness` higher (see `beside_others`). `tokens` is the path of the
    tenants file. `page` serves the status page at `/` of `http`; `api` configures the HTTP API. A stopping gateway lets
    turns run for at most `drain_seconds`. A peer without heartbeats for `lost_seconds` fails its turns.
    """

    listen: str
    http: str
    metrics: str
    router: str
    model: str
    model_name: str
    dtype: str
    device: str
    max_seconds: float
    max_calls: int = 4096
    page: bool = True
    api: HttpConfig = field(default_factory=HttpConfig)
    log_level: str = "info"
    log_levels: str = ""
    log_format: str = "human"
    drain_seconds: float = 2.0
    metric_names: str = ""
    metric_tenants: int = 0
    follow_stdin: bool = False
    is_spare: bool = False
    niceness: int = 0
    tokens: str = ""
    tls: ServerTls | None = None
    peer_tls: PeerTls | None = None
    lost_seconds: float = LOST_SECONDS
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        values = json.loads(text)
        tls, peer_tls, tracing, api = (values.pop(key) for key in ("tls", "peer_tls", "tracing", "api"))
        return cls(
            **values,
            tls=ServerTls(**tls) if tls else None,
            peer_tls=PeerTls(**peer_tls) if peer_tls else None,
            tracing=TracingConfig(**tracing),
            api=HttpConfig(**api),
        )
