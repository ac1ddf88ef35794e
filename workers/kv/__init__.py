"""Moves KV from rank to rank between rings: `KvSender` on the source, `KvReceiver` on the destination.

`InProcessNetwork` makes both for ranks that are threads of one process.
"""

from workers.kv.inprocess import InProcessNetwork, InProcessReceiver
from workers.kv.receiver import KvReceiver
from workers.kv.sender import KvSender

__all__ = ["InProcessNetwork", "InProcessReceiver", "KvReceiver", "KvSender"]
