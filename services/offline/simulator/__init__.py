"""Simulator of a trace over hundreds of rings: time is simulated, decisions are the planner's and the router's."""
