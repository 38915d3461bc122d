"""The rollout workers: they generate trajectories under one policy version each."""
