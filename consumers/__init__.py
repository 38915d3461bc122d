"""The trainer, its learners, objectives and teachers."""
