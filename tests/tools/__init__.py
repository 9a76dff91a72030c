"""What several tests use: plans, converted outputs, the command, tampering, an oracle."""
