"""What the processes of one ledger share in memory: liveness, wake-ups, stalled threads."""
