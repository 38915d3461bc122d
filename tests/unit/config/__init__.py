"""Tests of config, in this process and without IO."""
