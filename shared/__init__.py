"""What the services have in common: the wire, the bus, HTTP, telemetry."""

from shared import compiled

compiled.choose()
