"""Metrics of every process for Prometheus. Names and buckets are vLLM's if they mean the same.

Each process has a registry of its own and no global one. Events are counted where they happen; states (KV blocks,
progress) are read when Prometheus asks. Labels take values of short, fixed lists, each present from the start.
"""
