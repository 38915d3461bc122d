"""Learners: what computes a training step (`trainer.kind`), behind one port."""
