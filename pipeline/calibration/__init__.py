"""Measure a model on text and quantize it by what was measured, on the CPU, through the reference engine.

The parts: ``texts`` (what is run), ``observe`` (ears on the engine's layers), ``ranges`` (largest magnitudes),
``awq`` (search of factors for INT4), ``alpha`` (choice of the smoothing strength), ``sanity`` (scales that mean
something), ``quantize`` (all of it in order). The tensors themselves are written by :mod:`pipeline.checkpoint`.
"""
