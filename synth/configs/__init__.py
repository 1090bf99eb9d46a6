"""One config: read once from any of its forms, written, and turned into another config.

:mod:`~synth.configs.model` has the value that everything else uses, :mod:`~synth.configs.reading` makes it of a file or
a folder; v1, module and store know one form each, sidecar what stands beside it; porting and merging make one config of
others.
"""
