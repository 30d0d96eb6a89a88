"""The command line of the three-stage pipeline: everything that knows of a person at a terminal."""
