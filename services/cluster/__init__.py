"""Cluster: starting, supervising and stopping the processes of a service on Ray."""
