"""The private step: the only room that joins capture, subspace and privacy."""
