"""Messages between a ring's leader and its ranks. Plain data, imported without torch."""
