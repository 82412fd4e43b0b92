"""SIMULATED dollars: prices over time, bills and other spending."""
