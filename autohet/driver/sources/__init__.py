"""Sources of notices, and the merging of several sources' notices into one."""
