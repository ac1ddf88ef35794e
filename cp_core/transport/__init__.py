"""Transports: tensor messages between the ranks of one ring. No mathematics."""
