"""Measurement of this machine's devices for a job."""
