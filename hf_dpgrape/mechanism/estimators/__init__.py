"""What a step releases of an example, and what the noised mean does to the weights."""
