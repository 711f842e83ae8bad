"""The laboratory: trains language models with each method, and challenges AdamW at its own norm as
the paper does.

It depends on the library and never the other way round. The command ``normcontrol`` is its face.
"""
