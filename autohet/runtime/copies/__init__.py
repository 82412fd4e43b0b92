"""Copies of training state beside the live one: snapshots, uploads and replicas."""
