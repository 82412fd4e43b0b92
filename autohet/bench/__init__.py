"""Benchmarks of `autohet bench`."""
