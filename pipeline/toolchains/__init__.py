"""TensorRT-LLM releases as data, and pure adapters that turn a job into exact container commands.

Only this package names a TensorRT-LLM flag. Everything that differs between releases, model families and tools stands
in ``data/``; adding a release is adding a file there.
"""
