"""Measurement behind `ringserve bench selection`: rings whose ranks are in network namespaces, on links of any rate."""
