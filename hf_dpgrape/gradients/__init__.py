"""Per-sample gradients of a model's own tensors, projected while backward passes each layer."""
