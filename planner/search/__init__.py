"""One search for plans of unequal pipelines; planner/README.md leads through it."""
