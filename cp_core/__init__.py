"""Mathematics of context parallelism: layouts, partial attention, ring algorithms, transports and cost models.

Nothing is imported here: the modules that decide (layout, cost) load without torch.
"""
