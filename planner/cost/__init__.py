"""Cost of a plan: layers, memory, links, and the simulated step."""
