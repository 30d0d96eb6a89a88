"""The formulas of the three stages as pure functions: tensors in, tensors out, one topic a file."""
