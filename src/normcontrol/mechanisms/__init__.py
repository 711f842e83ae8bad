"""Optional mechanisms that only some published methods need.

Each file is one setting of ``NormControl``: ``size.py`` for ``size=``, ``start.py`` for ``start=``,
``update.py`` for ``relative_step=``, ``min_relative_step=`` and ``cautious=``. They know scopes and
tensors, and nothing about parameter groups, schedules or optimizers.
"""
