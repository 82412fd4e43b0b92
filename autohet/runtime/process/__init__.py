"""What a process of a job has beside its training: its log, its reports to the driver, the facts of
the instance that it runs on.
"""
