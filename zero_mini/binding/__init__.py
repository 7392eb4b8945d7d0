"""How the script of a step is bound to a model and an optimizer that know nothing of it.

checks.py  units.py              what is refused at the start; which parameters travel together
hooks.py                         the model's forward and backward run the moments of the script
parameter.py  out_of_turn.py     what a parameter becomes; what a read outside its unit's turn finds
pieces.py                        what the optimizer sees in place of the parameters
agreement.py  watch.py           what ranks compare at a step; writes and replacements that would be lost
precision.py                     inputs and outputs in another dtype
full_params.py                   whole parameters, gradients and states, to read and to change
"""
