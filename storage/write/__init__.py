"""The single writer of a run: sessions, locks, the commit protocol."""
