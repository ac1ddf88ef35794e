"""Open-loop load on a running service: who comes when, what they met, what it comes to."""
