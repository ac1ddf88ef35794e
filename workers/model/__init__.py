"""A rank's model: model directories, loading, tensor parallelism, the attention hook."""
