"""What only a real GPU can tell: `make gpu-check`."""
