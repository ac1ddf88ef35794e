"""How the next tokens are chosen from logits. `rows.sample_rows` is what steps call; `parameters` needs no torch."""
