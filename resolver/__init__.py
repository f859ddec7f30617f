"""Finds the host PID behind every process in a HAMi container, and keeps HAMi's shared regions truthful.

Nothing is imported here: every command pays for this module.
"""
