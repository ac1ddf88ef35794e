"""Files that the router's configuration names: they are read on the machine with the configuration, once."""

from __future__ import annotations

from pathlib import Path

from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.cost.selector import EmpiricalFit
from ringserve.cp_core.cost.sparse import SparseLosses, read_losses
from ringserve.cp_core.errors import ConfigError
from ringserve.services.config.service import RouterConfig
from ringserve.services.config.tree import Config


def router_profile(router: RouterConfig) -> HardwareProfile | None:
    """Return the profile of `router.profile`, read on the machine with the configuration: the router may run elsewhere.

    None where none is configured. Raises ConfigError, also where the selector needs constants that it does not hold.
    """
    try:
        profile = read_profile(router.profile) if router.profile else None
    except ConfigError as error:
        raise ConfigError(f"router.profile: {error}") from error
    empirical_fit(router, profile)
    return profile


def router_losses(config: Config) -> SparseLosses | None:
    """Return the losses of `router.sparse_losses`, read on the machine with the configuration; None without.

    Raises ConfigError, also where they are of another model.
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


def empirical_fit(router: RouterConfig, profile: HardwareProfile | None) -> EmpiricalFit | None:
    """Return the profile's constants. Raises ConfigError where the selector needs missing ones."""
    fit = None if profile is None else profile.empirical
    if fit is None and router.selector == "empirical":
        raise ConfigError(
            f"router.selector: 'empirical' needs alpha, beta and gamma, and router.profile {router.profile!r} has "
            f"none; allowed is one that was fitted to rings of 2 ranks or more"
        )
    return fit
