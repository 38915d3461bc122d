"""The learner on plain PyTorch: one process, equal bits under equal numerics."""
