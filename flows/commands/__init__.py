"""The longer work of operations, which `operations.late` imports when it begins."""
