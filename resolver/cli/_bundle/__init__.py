"""Parts of ``resolver bundle``."""
