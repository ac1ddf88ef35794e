"""Prefill ring: its leader, scheduler and loop, and the run of one turn."""
