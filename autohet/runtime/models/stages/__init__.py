"""Stages: contiguous blocks of a decoder with their weights, inputs and dropout."""
