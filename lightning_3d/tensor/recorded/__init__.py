"""WHAT do the rules come to?  The local program of a block, recorded once, proved, and run in their place.

`Recording` is in recording.py: the planner needs eager.py of this package before the rules are there.
"""
