"""The shared memory of one ledger's processes: liveness, wake-ups, stalled threads."""
