"""States on the disk, for any stage and number of ranks.

sharded.py     each rank writes what it holds, and loads what it needs
files.py       names, manifests and renames: after a crash the last checkpoint is still whole
resharding.py  from slices of N ranks to slices of M
"""
