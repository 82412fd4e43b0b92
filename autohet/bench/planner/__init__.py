"""Accuracy of the cost model and quality of the searches, against published figures."""
