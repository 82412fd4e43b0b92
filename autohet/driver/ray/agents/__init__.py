"""Agents: one actor for each node, and the calls and commands that it answers."""
