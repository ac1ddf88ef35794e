"""Sampling of next tokens from logits. Steps call `draw.sample_rows`; `parameters` needs no torch."""
