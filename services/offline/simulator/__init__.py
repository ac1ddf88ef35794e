"""Runs a trace over hundreds of rings: time is simulated, decisions are those of the planner and the router."""
