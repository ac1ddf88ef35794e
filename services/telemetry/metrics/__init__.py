"""What every process tells Prometheus. Names and buckets follow vLLM's where they mean the same.

Each process has a registry of its own and no global one. What happens is counted where it happens; what is so (KV
blocks, progress) is read when Prometheus asks. Labels take values of short, fixed lists, each there from the start.
"""
