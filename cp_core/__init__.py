"""The mathematics of context parallelism: layouts, partial attention, merging, ring algorithms, selectors, cost model.

Nothing is imported here: the modules that decide (layout, reshard, selector, cost_model) must load without torch.
"""
