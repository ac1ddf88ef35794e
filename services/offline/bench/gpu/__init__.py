"""Figures of one GPU beside their targets; `bench/gpu.py` runs them."""
