"""SIMULATED workforces: spot traces run through the real controller on a fake clock."""
