"""The doors and the wiring: gateway, ring servers, router server, client, command line, configuration."""
