"""Journal of the router over SQLite: what survives its death."""
