"""Tests of config, in process and without IO."""
