"""Bare rings of processes, and the kernels and steps of one rank, beside reference implementations."""
