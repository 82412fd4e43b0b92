"""Workforce on Ray: workers, agents, the cluster."""
