"""Gateway: the servers that clients call, by gRPC and by OpenAI's HTTP. Runs no Ray."""
