"""Durable checkpoints: written, committed, read, kept and removed."""
