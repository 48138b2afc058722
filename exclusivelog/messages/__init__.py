"""Encoding and decoding of messages: Python values, Arrow, items of shared states."""
