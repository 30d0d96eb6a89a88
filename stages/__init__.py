"""The three stages of RLHF as a library: it knows what RLHF is, and nothing of a terminal."""
