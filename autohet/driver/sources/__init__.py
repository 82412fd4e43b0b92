"""Where notices come from, and how those of several sources become one."""
