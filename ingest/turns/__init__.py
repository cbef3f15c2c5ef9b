"""One model call.

In: what an API's request asks for, within its limits. Out: the prompt, the completions as they grow, and the
turn that they came to.
"""
