"""What every room stands on: errors, files, processes, and the private Ray."""
