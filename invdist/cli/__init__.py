"""The commands, one thin file each: parse, call the library, print."""
