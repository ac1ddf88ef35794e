"""Partial attention with log-sum-exp: kernels, paged attention, and the exact merge of parts."""
