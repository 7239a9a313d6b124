"""The single writer of a run: sessions, locks and the commit protocol."""
