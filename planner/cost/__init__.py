"""What a plan costs: layers, memory, links, and the simulated step."""
