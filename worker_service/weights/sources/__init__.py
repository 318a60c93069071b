"""Where a model's tensors come from, and how those of an update get here."""
