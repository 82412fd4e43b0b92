"""Checks of `scripts/gpu`: this package's claims about GPUs, tried on the GPUs of this machine."""
