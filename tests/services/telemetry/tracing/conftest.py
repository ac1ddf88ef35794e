from __future__ import annotations

from tests.services.door_fixtures import codec, model_path

__all__ = ["codec", "model_path"]
