"""Model of a rank: model directories, loading, the tensor parallel share, and the attention hook."""
