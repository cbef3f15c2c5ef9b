"""The log over segments and sealed units alike.

In: appends of one writer a lane. Out: events by lane, tail, kind, trajectory or turn, at one cut.
"""
