"""Benches, planning, calibration, simulation and the demo: nothing here serves a request."""
