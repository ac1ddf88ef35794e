"""Prefill step of one rank."""
