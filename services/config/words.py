"""Words that keys of the configuration may have as their values, where no other module owns them."""

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
METRIC_NAMES = ("", "vllm")
