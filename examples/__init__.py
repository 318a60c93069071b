"""Programs that use the contract as a trainer does."""
