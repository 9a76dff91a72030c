"""What the other tests show on a CPU, sampled on an accelerator in a few minutes: `python -m tests.gpu`."""
