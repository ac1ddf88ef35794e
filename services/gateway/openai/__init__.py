"""The OpenAI-compatible door: HTTP and JSON in, the same turns as over gRPC."""
