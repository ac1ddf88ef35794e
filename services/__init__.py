"""Servers and commands: gateway, ring and router servers, client, command line, configuration; offline studies."""
