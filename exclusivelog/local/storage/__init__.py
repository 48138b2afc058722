"""The files on disk: LMDB tables, journal and segments; checkpoints and recovery."""
