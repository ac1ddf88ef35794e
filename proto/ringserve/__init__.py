"""ringserve: the contract in `ringserve.v1`, the Python clients in `ringserve.client`, and the server beside them.

The distribution `ringserve-client` holds the contract, the clients and the code that both sides of a call share. The
distribution `ringserve` depends on it and adds `services`, `orchestration`, `workers` and `cp_core`.
"""

__version__ = "0.1.0"
