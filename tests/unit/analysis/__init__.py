"""Tests of dora_pipe.analysis: rescore, fork, diff, retrain, bisect."""
