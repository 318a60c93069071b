"""The worker's own words for the contract: values and errors only, no protobuf, no torch."""
