"""Decode loop of a ring's ranks: batch, headers, steps and the prompts computed between them."""
