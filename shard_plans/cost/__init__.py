"""Predicted time of a step: the card's roofline, the links' latency and bandwidth, the pipeline's bubbles."""
