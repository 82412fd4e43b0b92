"""SIMULATED runs: spot traces run through the real controller on a fake clock."""
