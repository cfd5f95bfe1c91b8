"""Memory, bytes sent and time of a training job, estimated before it runs."""
