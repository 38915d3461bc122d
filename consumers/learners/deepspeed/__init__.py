"""The learner on DeepSpeed: ZeRO over several ranks, of which rank 0 is in the role's process."""
