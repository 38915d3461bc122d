"""Tests of tasks, in this process and without IO."""
