"""Ring algorithms: one file per prefill algorithm and decode variant."""
