"""What surrounds a collective: its entry in the ledger, the report of a missing rank, the use of copy engines.

Also a link that is slow on purpose, and the fit of what a link costs.

ledger.py       every collective, in the order of launch
lost_ranks.py   which rank is missing when one fails
copy_engine.py  all-gathers that take no SM from the computation
throttled.py    a Comm over a link of a given latency and bandwidth
fit.py          latency and bandwidth of each collective, fitted where it runs
"""
