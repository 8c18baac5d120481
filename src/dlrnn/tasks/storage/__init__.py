"""Data sets on disk: their format, how they are built, imported, downloaded, verified and read."""
