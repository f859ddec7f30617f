"""What `resolver top` is made of: `reading` asks the daemon, `tree` orders it, `rows`, `cells` and `frame` lay it out.

`screen` owns the terminal, and `live` is the loop between the two. Everything but `screen` and `live` is a function
of values, so that a frame in a test is the frame on a terminal.
"""
