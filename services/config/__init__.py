"""Configuration: one YAML file, one frozen tree, every default. `load_config` makes a `Config`."""

from ringserve.services.config.sections import (
    DEVICES,
    METRIC_NAMES,
    DecodeConfig,
    GatewayConfig,
    HttpConfig,
    KvCacheConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    PrefillConfig,
    RayConfig,
    RouterConfig,
    TimeoutConfig,
)
from ringserve.services.config.sources import config_from, given_keys, load_config
from ringserve.services.config.tree import Config
from ringserve.services.telemetry.logs import LOG_LEVELS

__all__ = [
    "DEVICES",
    "LOG_LEVELS",
    "METRIC_NAMES",
    "Config",
    "DecodeConfig",
    "GatewayConfig",
    "HttpConfig",
    "KvCacheConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "PrefillConfig",
    "RayConfig",
    "RouterConfig",
    "TimeoutConfig",
    "config_from",
    "given_keys",
    "load_config",
]
