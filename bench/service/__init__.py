"""The whole service beside transformers, and its gateway alone."""
