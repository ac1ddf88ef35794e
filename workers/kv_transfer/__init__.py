"""Moves KV from rank to rank between rings: `KvSender` on the source, `KvReceiver` on the destination.

`InProcessNetwork` makes both for ranks that are threads of one process.
"""

from workers.kv_transfer.inprocess import InProcessNetwork, InProcessReceiver
from workers.kv_transfer.receiver import KvReceiver
from workers.kv_transfer.sender import KvSender

__all__ = ["InProcessNetwork", "InProcessReceiver", "KvReceiver", "KvSender"]
