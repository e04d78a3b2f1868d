"""Data: named sets, folders, arrays; splits, batches, streams."""
