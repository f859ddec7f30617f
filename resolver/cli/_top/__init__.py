"""Parts of `resolver top`; `screen` alone knows the terminal."""
