"""Decode leader: its batch, block growth, preemption, and the end of turns."""
