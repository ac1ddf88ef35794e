"""Calibration of serving rings: real prefills, and the hardware profile fitted to them."""
