"""A worker without a model: the contract in full, tokens by hash, time by formula."""
