"""Messages between a ring's leader and its ranks. Pure data, imported without torch."""
