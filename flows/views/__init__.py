"""What people see of stored runs: tables, charts, reports, progress."""
