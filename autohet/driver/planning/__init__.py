"""Plans of a run: questions to the planner, expectations, workers' orders, nodes to buy."""
