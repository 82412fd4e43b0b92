"""Runtime of a job: the job document, models, data, process groups and training steps.

See README.md.
"""
