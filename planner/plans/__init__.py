"""Plans as values: stages and shares, their order and checks, and the model spec."""
