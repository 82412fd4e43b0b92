"""Log, driver reports and instance facts of a job's process, apart from its training."""
