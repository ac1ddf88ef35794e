"""Token sampling from logits. Steps call `sampler.sample_rows`. `parameters` needs no torch."""
