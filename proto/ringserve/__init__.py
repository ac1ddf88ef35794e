"""Generated stubs of the ringserve contract live in `ringserve.v1`."""
