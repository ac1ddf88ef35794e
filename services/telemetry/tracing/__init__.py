"""Traces of turns for OpenTelemetry. Off unless `tracing.endpoint` is set; only `otel.py` imports the library."""
