"""The documents that people and programs exchange: plans, manifests, and strict YAML."""
