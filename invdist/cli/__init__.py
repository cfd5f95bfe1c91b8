"""The commands: one thin file each, which parses, calls the library and prints."""
