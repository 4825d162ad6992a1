"""The worker's side of the KV exchange: between the bus and its engine."""
