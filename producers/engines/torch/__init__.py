"""The own engine: Hugging Face causal models in float32 on a CPU, with bits that do not depend on
the batch."""
