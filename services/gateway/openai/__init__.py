"""OpenAI-compatible endpoint: HTTP and JSON, for the same turns as over gRPC."""
