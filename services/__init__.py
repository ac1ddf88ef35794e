"""The doors and the wiring: gateway, group servers, router server, client, command line, configuration."""
