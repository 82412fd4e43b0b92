"""From what is held to what is wanted: the schedule of reads and messages, and one worker's part of
it.
"""
