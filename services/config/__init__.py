"""Configuration: one YAML file, one frozen tree, every default. `load_config` makes a `Config`."""

from ringserve.services.config.checks import METRIC_NAMES
from ringserve.services.config.reading import config_from, load_config
from ringserve.services.config.rings import DecodeConfig, KvCacheConfig, PrefillConfig
from ringserve.services.config.service import (
    GatewayConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    RayConfig,
    RouterConfig,
    TimeoutConfig,
)
from ringserve.services.config.tree import Config
from ringserve.services.telemetry.logs import LOG_LEVELS

__all__ = [
    "LOG_LEVELS",
    "METRIC_NAMES",
    "Config",
    "DecodeConfig",
    "GatewayConfig",
    "KvCacheConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "PrefillConfig",
    "RayConfig",
    "RouterConfig",
    "TimeoutConfig",
    "config_from",
    "load_config",
]
