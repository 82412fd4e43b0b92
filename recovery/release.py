"""Version of this release, which rises with the changelog and is in every document."""

RELEASE = "0.2.0"
