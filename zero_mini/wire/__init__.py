"""What a collective needs beside the call: it is counted, a rank that is missing is named, copy engines may carry it.

ledger.py       every collective, in the order of launch
lost_ranks.py   which rank is missing when one fails
copy_engine.py  all-gathers that take no SM from the computation
"""
