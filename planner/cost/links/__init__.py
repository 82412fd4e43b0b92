"""Seconds and dollars of what plans send between workers, nodes and zones."""
