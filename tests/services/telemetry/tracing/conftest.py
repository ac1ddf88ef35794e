from __future__ import annotations

from tests.services.local_gateway import codec, model_path

__all__ = ["codec", "model_path"]
