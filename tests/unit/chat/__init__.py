"""Tests of chat templates, in process."""
