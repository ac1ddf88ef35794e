"""Placement: the rings a router knows, their predicted costs, the choice of rings, and where KV lies."""
