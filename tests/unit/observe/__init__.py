"""Tests of a run's exported telemetry."""
