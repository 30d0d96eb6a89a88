"""Speed, memory and what is learned, beside the tools that people use for the same work."""
