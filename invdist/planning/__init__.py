"""What a run would take before it is paid for: memory, bytes on the wire, time."""
