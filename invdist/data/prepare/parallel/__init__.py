"""`invdist prepare --workers N`: the rules of `prepare`, in many processes on Ray (see `driver`)."""
