"""Appending to topics and reading them."""
