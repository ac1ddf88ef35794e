"""Groups of options that several commands share, and the cluster or gateway that they name.

`ServingOptions` may start a cluster; the others start nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ringserve.client import Client, RetryPolicy, TlsFiles
from ringserve.cp_core.errors import ConfigError, InvalidRequest, NotFound
from ringserve.services.cli.command import flag, option
from ringserve.services.cluster.state import require_ready

# The configuration is imported by those who load it: it takes half of the time in which a command shows its help.
if TYPE_CHECKING:
    from ringserve.services.config import Config

MAX_DRAIN_SECONDS = 86_400
TOKEN_VARIABLE = "RINGSERVE_TOKEN"
"""Environment variable with the bearer token of commands that call a gateway."""
AT_ONCE = RetryPolicy(max_attempts=1, connect_seconds=0.0)
"""Retries for a user at a terminal: a refused call fails at once, a turn that has begun goes on if its gateway dies."""

ClusterName = Annotated[str, Option("--name", metavar="NAME", help="name of the local cluster")]
JsonFlag = Annotated[bool, Option("--json", help="print one JSON object")]
DrainSeconds = Annotated[
    float,
    Option(min=0, max=MAX_DRAIN_SECONDS, metavar="N", help="how long turns may go on when the process is told to end"),
]
PlotFile = Annotated[Path | None, Option(metavar="FILE.png", help="draw the figures; needs the extra `plot`")]


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The configuration: a file, and values that override it."""

    config: Path | None = option("configuration file (YAML)", default=None)
    overrides: list[str] = option(
        "override one value, e.g. prefill.cp=4; repeatable", "SECTION.KEY=VALUE", [], name="--set"
    )

    def load(self) -> Config:
        """Load the configuration. Raises ConfigError."""
        from ringserve.services.config import load_config

        return load_config(self.config, self._by_key())

    def given(self, section: str) -> set[str]:
        """Return the keys of a section that options, environment or file give. Raises ConfigError."""
        from ringserve.services.config import given_keys

        return given_keys(section, self.config, self._by_key())

    def _by_key(self) -> dict[str, str]:
        overrides: dict[str, str] = {}
        for item in self.overrides:
            key, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"--set: {item!r} is not SECTION.KEY=VALUE")
            overrides[key] = value
        return overrides


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The gateway of a client's command."""

    target: str = option("gateway (default: that of the local cluster)", "HOST:PORT", "")
    tls_ca: Path | None = option("use TLS; authority of the gateway's certificate", default=None)
    tls_cert: Path | None = option("client certificate, for mutual TLS", default=None)
    tls_key: Path | None = option("key of the client certificate", default=None)
    tls_server_name: str = option("name in the gateway's certificate", "NAME", "")
    name: ClusterName = "default"

    def client(self, target: str = "") -> Client:
        """Return a client of the target; its token comes from the environment, since command lines are public.

        Raises NotFound if there is neither a target nor a local cluster, ConfigError for files that cannot be read.
        """
        tls = None
        if self.tls_ca or self.tls_cert or self.tls_key:
            tls = TlsFiles(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name)
        return Client(target or self.address(), token=os.environ.get(TOKEN_VARIABLE, ""), tls=tls, retry=AT_ONCE)

    def address(self) -> str:
        """Return the address of the gateway. Raises NotFound if there is neither a target nor a local cluster."""
        target = self.target or require_ready(self.name).gateway
        if not target:
            raise NotFound(f"the cluster {self.name!r} runs no gateway of its own; give --target HOST:PORT")
        return target


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Service to measure, which runs already or is started for the measurement."""

    start: bool = flag("start a cluster for the measurement, and stop it")
    gateway: TargetOptions
    config: ConfigOptions

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Yield the gateway of a measurement, HOST:PORT, of a running cluster or of one started for the context.

        Raises ConfigError for options that exclude each other.
        """
        if not self.start:
            if self.config.config is not None or self.config.overrides:
                raise ConfigError("--config and --set: only for a cluster that --start starts")
            yield self.gateway.address()
            return
        if self.gateway.target:
            raise ConfigError("--target: not together with --start, whose cluster has a gateway of its own")
        from ringserve.services.config import LogConfig

        config = self.config.load()
        # Free ports avoid clashes with other clusters; info lines would break the progress bar.
        gateway = replace(config.gateway, listen="127.0.0.1:0", metrics="", http="")
        # Commands that start no cluster do without Ray: its import takes longer than all else.
        from ringserve.services.cluster.local import LocalCluster

        cluster = LocalCluster(replace(config, gateway=gateway, logs=LogConfig(level="warning")))
        try:
            cluster.start()
            yield cluster.gateway_address
        finally:
            cluster.stop()


def read_text(path: Path) -> str:
    """Read a file that a user names. Raises InvalidRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: byte {error.start + 1} is no UTF-8 text; convert it to UTF-8") from None
