"""SIMULATED workforces: spot traces through the real controller on a fake clock."""
