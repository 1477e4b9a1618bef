"""`lohan bench`: how fast this machine's CPU optimizer and file transfers are, beside what others reach in the same run.

Importing a module of this package loads no torch; measuring does where tensors are needed.
"""
