"""Requests to Ray's autoscaler: standing requests, drains and failed launches."""
