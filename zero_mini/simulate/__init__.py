"""One process as rank r of N, with real allocations, where the other ranks are absent.

values.py   initial values as a function of (name, element), so that absent ranks' are computed
absent.py   a Comm whose collectives fill in what absent ranks would have sent
measure.py  what one or two steps took, and which of it is real
setup.py    a GPT as rank r of N; what is refused
paper.py    the paper's figure 1, tables 1 and 2 and its title, measured
"""
