"""Writing by a run's single writer: sessions, locks and the commit protocol."""
