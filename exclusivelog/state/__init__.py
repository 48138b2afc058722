"""State that several processes share, with a topic as its write-ahead log."""
