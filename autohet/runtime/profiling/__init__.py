"""Measures this machine's devices for a job."""
