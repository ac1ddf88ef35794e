"""Sampling of next tokens from logits. Steps call `sampler.sample_rows`; `parameters` needs no torch."""
