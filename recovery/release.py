"""Version of this release, which rises with the changelog and is in every document."""

from __future__ import annotations

RELEASE = "0.2.0"
