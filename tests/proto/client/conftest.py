from __future__ import annotations

from tests.services.local_gateway import codec, gateway, model_path, oracle

__all__ = ["codec", "gateway", "model_path", "oracle"]
