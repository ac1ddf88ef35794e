"""Benches, planning, calibration, simulation and the demo; none of them serves a request."""
