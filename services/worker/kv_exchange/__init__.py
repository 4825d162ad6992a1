"""The worker's part of the KV exchange: between the bus and the engine."""
