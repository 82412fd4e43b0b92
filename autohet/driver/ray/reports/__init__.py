"""Reports of workers and agents on their way to the driver, and the detection of silence."""
