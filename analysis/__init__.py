"""Replays with one change: rescore, retrain, bisect, fork and diff."""
