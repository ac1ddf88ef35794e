"""Claims of the papers on their systems beside what this project measures and predicts."""
