"""Layouts: tokens on ranks, plans of steps, and plans of resharding KV."""
