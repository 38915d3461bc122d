"""The built-in engine: batch-invariant Hugging Face causal models, float32, CPU."""
