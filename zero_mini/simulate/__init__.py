"""One process as rank r of N, with real allocations, where the other ranks are absent.

values.py   initial values as a function of (name, element), so that absent ranks' are computed
absent.py   a Comm whose collectives fill in what absent ranks would have sent
"""
