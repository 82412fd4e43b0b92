"""Random walk from plan to plan, and the judgement of each plan."""
