"""One machine: the log of a directory, which its processes share."""
