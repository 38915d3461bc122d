"""Tests of tasks, in process and without IO."""
