"""Tests of the policy store and of safetensors files."""
