"""Learners: training engines with one port (`trainer.kind`)."""
