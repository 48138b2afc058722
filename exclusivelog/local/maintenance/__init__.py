"""Maintenance of a ledger: retention, compaction, snapshots, deletion, backups."""
