"""Integrations with trainers: a callback for Lightning, arguments for the Trainer of Hugging Face."""
