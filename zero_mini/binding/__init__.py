"""Binds the script of a step to an ordinary model and optimizer.

checks.py                        what zeroify() refuses
units.py  split.py               which parameters form a unit; units finer than blocks
hooks.py                         the model's forward and backward run the moments of the script
parameter.py  out_of_turn.py     what a parameter becomes; what a read outside its unit's turn does
pieces.py                        what the optimizer sees in place of the parameters
agreement.py  watch.py           what ranks compare at a step; writes and replacements that would be lost
precision.py                     inputs and outputs in another dtype
full_params.py                   whole parameters, gradients and states, to read and to change
"""
