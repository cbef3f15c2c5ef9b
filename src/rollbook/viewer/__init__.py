"""Pages over a log, for a browser: `rollbook view`, and `/view` of a proxy.

In: an address, of which each page is a question to the SQL views. Out: the page, and at the same address
with `.json` what it shows. Nothing here writes, but for what a judge gives: rewards, labels, preferences.
"""
