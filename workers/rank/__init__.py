"""Rank: the worker that a leader calls, how it joins its ring, and what it measures of itself."""
