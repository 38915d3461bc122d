"""Teachers: untrained models that score the sampled tokens."""
