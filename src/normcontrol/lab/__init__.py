"""The laboratory: trains language models with each method, and challenges AdamW at its own norm as
the paper does.

The laboratory imports the library; the library never imports the laboratory. It is used through the
command ``normcontrol``.
"""
