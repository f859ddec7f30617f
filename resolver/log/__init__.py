"""What is logged: the names of events, the journal that says them, and the last of them for clients of the API."""
