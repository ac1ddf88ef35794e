"""Gateway: everything a client meets, over gRPC and over OpenAI's HTTP. Runs no Ray."""
