"""Training under SkyPilot: task files, and the supervisor that changes regions."""
