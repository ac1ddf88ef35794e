"""Figures of one GPU beside their targets."""
