"""Snapshots of one node, in host memory and on its disk."""
