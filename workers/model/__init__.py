"""Model directories: reading, loading, tensor parallel cutting, and the attention hook."""
