"""Data plane: the work of one rank of a ring.

Nothing is imported here: the control plane imports `workers.protocol` and must not load torch.
"""
