"""Rendezvous store of a generation: torch's TCPStore protocol for authenticated workers."""
