"""Rollout worker: state machine, requests and ports."""
