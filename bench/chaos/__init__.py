"""Chaos: the service under load while its processes are killed and stopped, and the verdict on what clients saw."""
