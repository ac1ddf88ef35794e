"""Transports: how tensors travel between the ranks of one ring. No mathematics."""
