"""Records on disk → token ids and target marks → a memory-mapped store → the order of batches."""
