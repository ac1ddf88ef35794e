"""Measurements of `ringserve bench`: rings of processes on this machine, one thread a rank."""
