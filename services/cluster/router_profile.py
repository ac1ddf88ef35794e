"""The measured profile that a router plans by, and the empirical selector's constants."""

from __future__ import annotations

from cp_core.cost.profile import HardwareProfile, read_profile
from cp_core.cost.selector import EmpiricalFit
from cp_core.errors import ConfigError
from services.config import RouterConfig


def router_profile(router: RouterConfig) -> HardwareProfile | None:
    """Of `router.profile`, read where the configuration is: the router may run elsewhere.

    None where none is configured. Raises ConfigError, also where the selector needs constants that it does not hold.
    """
    try:
        profile = read_profile(router.profile) if router.profile else None
    except ConfigError as error:
        raise ConfigError(f"router.profile: {error}") from error
    empirical_fit(router, profile)
    return profile


def empirical_fit(router: RouterConfig, profile: HardwareProfile | None) -> EmpiricalFit | None:
    """The configured constants, else the profile's. Raises ConfigError where the selector needs what neither has."""
    if router.alpha or router.beta or router.gamma:
        return EmpiricalFit(alpha=router.alpha, beta=router.beta, gamma=router.gamma)
    fit = None if profile is None else profile.empirical
    if fit is None and router.selector == "empirical":
        raise ConfigError(
            f"router.selector: 'empirical' needs alpha, beta and gamma, and router.profile {router.profile!r} has "
            f"none; allowed is one that was fitted to rings of 2 ranks or more"
        )
    return fit
