"""A published checkpoint as it lies on disk: safetensors headers, validated, kept as columns."""
