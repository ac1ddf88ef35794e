"""A code among a million tokens: a model that finds it, and the check of its answer."""
