from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import WAIT_SECONDS

PROGRAM = """
import sys
from pathlib import Path
import torch
from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.workers.rank.probe import finished, probe_decode_rates, probe_rates
from ringserve.workers.rank.worker import RankWorker
from ringserve.workers.model.loading import load_model

model = load_model(Path(sys.argv[1]), "float32", "cpu")
(ring,) = InProcessRing(1).transports
on_rank = (model.info, torch.device("cpu"), select_backend("auto", "cpu", torch.float32), ring)
finished(probe_decode_rates(finished(probe_rates(*on_rank)), *on_rank, 16))
model.pack_weights(with_head=True)
heavy = {"torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}
print(sorted(heavy & sys.modules.keys()))

# What is no part of serving is as it was: masks of a batch by transformers, and torch's compiler.
from transformers import AutoModelForCausalLM, LlamaConfig
import transformers.models
stock = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.arange(24).reshape(2, 12)
padding = torch.ones_like(ids)
padding[0, :4] = 0
assert stock.generate(ids, attention_mask=padding, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 14)
assert transformers.models.LlamaConfig is LlamaConfig
assert torch.distributed.is_available()
assert callable(torch._dynamo.reset) and torch.compiler.disable.__module__ == "torch.compiler"
"""

INTERPOLATION = """
from enum import Enum

class InterpolationMode(Enum):
    NEAREST, NEAREST_EXACT, BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = range(7)
"""


def test_a_rank_loads_neither_torchs_compiler_nor_sharded_tensors(model_paths: Mapping[str, Path]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(model_paths["llama_gqa"])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n"


def test_a_rank_loads_beside_a_package_that_imports_torchs_compiler(
    model_paths: Mapping[str, Path], tmp_path: Path
) -> None:
    """As torchvision does, which transformers imports where it is installed."""
    (tmp_path / "torchvision" / "transforms").mkdir(parents=True)
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torch._dynamo.utils as utils\nutils.dynamo_timed\nio = None\n"
    )
    (tmp_path / "torchvision" / "transforms" / "__init__.py").write_text(INTERPOLATION)
    (tmp_path / "torchvision" / "transforms" / "functional.py").write_text("pil_to_tensor = None\n")
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", PROGRAM, str(model_paths["llama_gqa"])]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr
    assert "torch._dynamo" in ran.stdout
