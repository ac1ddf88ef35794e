from __future__ import annotations

from tests.services.door_fixtures import codec, doors, model_path, oracle

__all__ = ["codec", "doors", "model_path", "oracle"]
