"""Code that the lessons share.

lesson.py                                 helpers of a lesson's first cell
ranks.py  rank_process.py  pickling.py    a function run on N ranks from a notebook or a test
scaling.py                                the paper's more than linear speed-up, as a model
cases.py                                  ten faults, what each leaves behind, and a judge of the names given to them
plots                                     figures
"""
