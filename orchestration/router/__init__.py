"""Router: a turn from its request to its end, drains and returning rings."""
