"""Tests of the orchestrator: bound, fold, planner, machine."""
