"""How examples are drawn: one file per way of sampling, and one row in `table`."""
