"""What is on disk: the LMDB tables, the journal, segments, checkpoints, recovery."""
