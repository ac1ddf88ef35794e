"""Measurements behind `ringserve bench`: rings of processes on this machine, one thread a rank."""
