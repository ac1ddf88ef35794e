"""KV of one rank: its cache, and its transfer between rings from a `KvSender` to a `KvReceiver`.

`InProcessNetwork` makes both for ranks that are threads of one process.
"""

from workers.kv.inprocess import InProcessNetwork, InProcessReceiver
from workers.kv.receiver import KvReceiver
from workers.kv.sender import KvSender

__all__ = ["InProcessNetwork", "InProcessReceiver", "KvReceiver", "KvSender"]
