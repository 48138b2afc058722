"""What keeps a ledger small and safe: retention, compaction, snapshots, backups."""
