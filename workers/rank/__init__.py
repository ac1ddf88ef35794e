"""Rank: the worker that a leader calls, its rendezvous with its ring, and its measurements of itself."""
