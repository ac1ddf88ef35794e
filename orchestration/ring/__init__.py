"""Ring: its actors, its life, its KV pool, and transfers between rings."""
