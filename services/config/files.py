"""Files that the router's configuration names. The cluster reads them once, on the machine with the configuration."""

from __future__ import annotations

from pathlib import Path

from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.cost.sparse import SparseLosses, read_losses
from ringserve.cp_core.errors import ConfigError
from ringserve.services.config.sections import RouterConfig
from ringserve.services.config.tree import Config


def router_profile(router: RouterConfig) -> HardwareProfile | None:
    """Return the profile of `router.profile`, read on the machine with the configuration: the router may run elsewhere.

    Return None if none is configured. Raises ConfigError.
    """
    try:
        return read_profile(router.profile) if router.profile else None
    except ConfigError as error:
        raise ConfigError(f"router.profile: {error}") from error


def router_losses(config: Config) -> SparseLosses | None:
    """Return the losses of `router.sparse_losses`, read on the machine with the configuration; None without.

    Raises ConfigError if the file cannot be read, or if it was measured for another model.
    """
    if not config.router.sparse_losses:
        return None
    try:
        losses = read_losses(Path(config.router.sparse_losses))
    except ConfigError as error:
        raise ConfigError(f"router.sparse_losses: {error}") from error
    served = Path(config.model.path).name
    if losses.model != served:
        raise ConfigError(
            f"router.sparse_losses: {config.router.sparse_losses} has losses of model {losses.model!r}; served is "
            f"{served!r}"
        )
    return losses
