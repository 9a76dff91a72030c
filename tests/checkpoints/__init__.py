"""Makers of checkpoints: tiny ones with references from transformers, a trained one, and full-size sparse ones."""
