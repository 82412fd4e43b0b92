"""The workforce carried out by Ray: workers, agents, the cluster."""
