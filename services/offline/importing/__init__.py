"""Import of models in GGUF: reading, tokenizer, writing a Hugging Face directory, and the built-in real model."""
