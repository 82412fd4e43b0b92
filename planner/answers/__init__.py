"""Answers of a running job: replanning, repairs, robustness and explanations of plans."""
