"""What ``resolver bundle`` is made of."""
