"""SIMULATED fleet: machines, workers and their generations on a fake clock."""
