"""SPMD programs over unequal devices: rules, search, ratios and what they cost.

Pure: `autohet/runtime/spmd` captures and runs them.
"""
