"""Calibration of serving rings: real prefills, and the hardware profile and empirical selector fitted to them."""
