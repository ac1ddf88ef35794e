"""Benchmark of the router: decisions under load, and its parts one by one."""
