"""Tests of the rollout worker's parts."""
