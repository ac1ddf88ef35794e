"""The data plane: what one rank of a ring does.

Nothing is imported here: `workers.protocol.steps` must load without torch, the control plane depends on it.
"""
