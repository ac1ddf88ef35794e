"""Partial attention with log-sum-exp: its kernels, paged forms, and the exact merge of parts."""
