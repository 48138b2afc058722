"""Who may write: sessions and their queue, transfers, claims, roles, notifications."""
