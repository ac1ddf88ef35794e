"""Journal of the router over SQLite: the state that survives its death."""
