"""Cost of a turn, a decode step and a migration on given hardware, and the memory they need. Pure Python, no torch."""
