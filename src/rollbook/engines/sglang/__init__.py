"""SGLang behind HTTP.

In: prompt ids for its native `/generate`. Out: ids, logprobs and weight versions, from one server or from
those behind a router.
"""
