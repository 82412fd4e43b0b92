"""Layers as a stage computes them: attention, experts, adapters, parallel forms, the loss."""
