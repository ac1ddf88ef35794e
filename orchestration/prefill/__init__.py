"""Prefill leader: its queue, scheduler, loop, and the run of one turn."""
