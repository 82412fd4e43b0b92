"""Bytes that plans need on devices and hosts."""
