"""What ``resolver explain`` is made of."""
