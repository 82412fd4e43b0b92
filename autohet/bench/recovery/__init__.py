"""Restores over limited links by the real code, policies side by side."""
