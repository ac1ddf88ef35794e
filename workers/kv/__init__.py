"""KV of one rank: its cache, and transfers between rings from a `KvSender` to a `KvReceiver`."""
