"""Package of programs that talk to ringserve: stubs of the contract in `ringserve.v1`, clients in `ringserve.client`.

The distributions `ringserve` (the server) and `ringserve-client` contain the same files.
"""

__version__ = "0.1.0"
