"""Durable storage behind one small protocol."""
