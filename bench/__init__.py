"""The laboratory: measurements, faults and the papers' tables. `python -m bench` lists its commands."""
