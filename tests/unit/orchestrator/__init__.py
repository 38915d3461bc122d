"""Tests of the orchestrator: the bound, the fold, the planner, the machine."""
