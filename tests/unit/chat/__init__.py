"""Tests of chat templates, in this process."""
