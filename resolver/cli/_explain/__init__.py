"""Parts of ``resolver explain``."""
