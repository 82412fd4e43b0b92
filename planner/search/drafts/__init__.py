"""Drafts: near-equal pipelines with cut layers, before and after they have workers."""
