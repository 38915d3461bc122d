"""Tests of benchmarks, without asserting times."""
