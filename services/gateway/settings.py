"""Settings of a gateway process, written as JSON by `services.cluster.local` and read by the process.

They hold paths of secrets, never secrets.
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
    """Settings of one gateway.

    `follow_stdin` ends the gateway when standard input closes, that is with its parent. `tokens` is the path of the
    file of tenants. `page` serves a page at `/` of `http`, and `api` settles its
    requests. A gateway that is told to end lets its turns run for at most
    `drain_seconds`. A peer that gives no sign of life for `lost_seconds` fails its turns.
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
    tokens: str = ""
    tls: ServerTls | None = None
    peer_tls: PeerTls | None = None
    lost_seconds: float = LOST_SECONDS
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        tls, peer_tls, tracing, api = (values.pop(key) for key in ("tls", "peer_tls", "tracing", "api"))
        return cls(
            **values,
            tls=ServerTls(**tls) if tls else None,
            peer_tls=PeerTls(**peer_tls) if peer_tls else None,
            tracing=TracingConfig(**tracing),
            api=HttpConfig(**api),
        )
