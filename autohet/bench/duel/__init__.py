"""Elastic trainers side by side: the same model, rows, notices and kills on one machine."""
