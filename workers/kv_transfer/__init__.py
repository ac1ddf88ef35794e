"""Moves KV from rank to rank between rings: `KvSender` on the source, `KvReceiver` on the destination."""

from workers.kv_transfer.receiver import KvReceiver
from workers.kv_transfer.sender import KvSender

__all__ = ["KvReceiver", "KvSender"]
