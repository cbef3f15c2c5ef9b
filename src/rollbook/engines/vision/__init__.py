"""Images as models see them.

In: an image's bytes, and the settings of a model's image processor. Out: the image in the size that the model
takes, its patches, how many tokens stand for it, and the places of these.
"""
