"""Open-loop load on a running service: arrivals, their replay, and a summary of the outcomes."""
