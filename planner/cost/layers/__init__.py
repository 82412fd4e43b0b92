"""Seconds of layers: measured, interpolated or estimated."""
