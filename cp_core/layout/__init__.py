"""Layouts: tokens on ranks, step plans, reshard plans."""
