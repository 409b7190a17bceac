"""Peak memory of a training step, predicted without weights and without the device."""
