"""Width rules: what changes from a narrow tuned model to a wide one when the noise dominates."""
