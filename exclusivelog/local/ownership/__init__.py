"""Write access: sessions and their queue, hand-overs, claims, roles, notifications."""
