"""Measures rings that serve by real prefills, and fits a hardware profile and the empirical selector to them."""
