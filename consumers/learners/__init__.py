"""Learners: training engines behind one port (`trainer.kind`)."""
