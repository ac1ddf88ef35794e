"""Ring of either role: its leader, actors, life, KV pool, and transfers between rings."""
