"""Configuration: one YAML file, one frozen tree, every default. `load_config` makes a `Config`."""

from services.config.checks import METRIC_NAMES
from services.config.reading import config_from, load_config
from services.config.rings import DecodeConfig, KvCacheConfig, PrefillConfig
from services.config.service import (
    GatewayConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    RayConfig,
    RouterConfig,
    TimeoutConfig,
)
from services.config.tree import Config
from services.telemetry.logs import LOG_LEVELS

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
