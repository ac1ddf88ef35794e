"""Layouts: which tokens lie on which rank, what a step moves, and how KV is resharded. Pure Python and numpy."""
