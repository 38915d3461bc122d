"""Learner on plain PyTorch: one process, bit-equal results under equal numerics."""
