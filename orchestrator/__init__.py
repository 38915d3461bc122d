"""Orchestrator: folds the log, admits groups, places requests and takes batches."""
