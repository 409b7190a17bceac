"""Tools for DP-muP: what to tune and to train at two widths, and whether that is right."""
