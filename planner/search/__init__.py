"""Search for plans of unequal pipelines; planner/README.md explains it step by step."""
