"""Choice of a ring's transport by device, by name and by how many ranks share a GPU."""

from __future__ import annotations

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.ring_backend import select_ring_backend


@pytest.mark.parametrize(
    ("name", "device", "gpus_per_rank", "chosen"),
    [
        ("auto", "cpu", 1.0, "sockets"),
        ("auto", "cpu", 0.25, "sockets"),
        ("auto", "cuda", 1.0, "nccl"),
        ("sockets", "cuda", 1.0, "sockets"),
        ("auto", "cuda", 0.5, "sockets"),
        ("sockets", "cuda", 0.5, "sockets"),
    ],
)
def test_ranks_with_a_gpu_each_take_nccl_and_others_sockets(
    name: str, device: str, gpus_per_rank: float, chosen: str
) -> None:
    assert select_ring_backend(name, device, gpus_per_rank) == chosen


def test_nccl_is_refused_where_ranks_share_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"'nccl' needs a whole GPU per rank, and gpus_per_rank is 0\.25; allowed"):
        select_ring_backend("nccl", "cuda", 0.25)
