"""The private Trainer, and everything that knows of Hugging Face."""
